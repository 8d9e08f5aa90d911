"""What follows from the accounts of all ranks does not depend on how they come together."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lightning_replica.recovery.account import merged

MOVE = {"bytes": 8, "seconds": 0.5, "host": False}


def accounts_of(born: list[int], bases: list[int], moved: list[int], inexact: list[int]) -> list[dict[str, Any]]:
    """Accounts by rank: in which generation each was born, which each says was over, and to whom a shard was sent."""
    return [
        {
            "reporter": rank,
            "time": f"of {rank}",
            "phases": {"stop": float(rank)},
            "base": base,
            "born": [[rank, generation]],
            "reported": rank % 3,
            "moves": [{"source": source, "target": rank, **MOVE} for source in moved if source != rank],
            "inexact": {f"finding {number}": "why" for number in inexact if number == rank},
        }
        for rank, (generation, base) in enumerate(zip(born, bases, strict=True))
    ]


numbers = st.lists(st.integers(0, 3), min_size=4, max_size=4)


@given(numbers, numbers, numbers, numbers, st.permutations(range(4)), st.integers(1, 3))
def test_the_order_does_not_matter_nor_do_accounts_that_are_together_already(
    born: list[int], bases: list[int], moved: list[int], inexact: list[int], order: list[int], cut: int
) -> None:
    accounts = accounts_of(born, bases, moved, inexact)
    whole = merged(accounts)
    assert merged([accounts[rank] for rank in order]) == whole
    base = min(bases)
    assert whole["replaced"] == [rank for rank in range(4) if born[rank] > base]
    there = [rank for rank in range(4) if born[rank] <= base] or [0]
    assert (whole["reporter"], whole["time"]) == (there[0], f"of {there[0]}")
    assert [(each["target"], each["source"]) for each in whole["moves"]] == sorted(
        {(rank, source) for rank in range(4) for source in moved if source != rank}
    )
    assert {int(name.split()[1]) for name in whole["inexact"]} == {*inexact}
    again = merged([whole, accounts[order[0]]])  # as a rank does that gives up
    assert {key: again[key] for key in ("base", "replaced", "moves", "inexact")} == {
        key: whole[key] for key in ("base", "replaced", "moves", "inexact")
    }
