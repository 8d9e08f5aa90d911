"""What follows from the accounts of all ranks does not depend on how they come together."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lightning_replica.control.faults import Fault
from lightning_replica.control.generation import Generations
from lightning_replica.recovery import account as account_file
from lightning_replica.recovery.account import Account, merged
from lightning_replica.stores.tagged import TaggedStore

MOVE = {"bytes": 8, "seconds": 0.5, "host": False}


def accounts_of(starts: list[int], bases: list[int], moved: list[int], inexact: list[int]) -> list[dict[str, Any]]:
    """Accounts by rank: in which generation each began, which each says was over, and to whom a shard was sent."""
    return [
        {
            "reporter": rank,
            "time": f"of {rank}",
            "phases": {"stop": float(rank)},
            "base": base,
            "starts": [[rank, generation]],
            "reported": rank % 3,
            "moves": [{"source": source, "target": rank, **MOVE} for source in moved if source != rank],
            "inexact": {f"finding {number}": "why" for number in inexact if number == rank},
        }
        for rank, (generation, base) in enumerate(zip(starts, bases, strict=True))
    ]


numbers = st.lists(st.integers(0, 3), min_size=4, max_size=4)


@given(numbers, numbers, numbers, numbers, st.permutations(range(4)), st.integers(1, 3))
def test_the_order_does_not_matter_nor_do_accounts_that_are_together_already(
    starts: list[int], bases: list[int], moved: list[int], inexact: list[int], order: list[int], cut: int
) -> None:
    accounts = accounts_of(starts, bases, moved, inexact)
    whole = merged(accounts)
    assert merged([accounts[rank] for rank in order]) == whole
    base = min(bases)
    assert whole["replaced"] == [rank for rank in range(4) if starts[rank] > base]
    there = [rank for rank in range(4) if starts[rank] <= base] or [0]
    assert (whole["reporter"], whole["time"]) == (there[0], f"of {there[0]}")
    assert [(each["target"], each["source"]) for each in whole["moves"]] == sorted(
        {(rank, source) for rank in range(4) for source in moved if source != rank}
    )
    assert {int(name.split()[1]) for name in whole["inexact"]} == {*inexact}
    again = merged([whole, accounts[order[0]]])  # as a rank does that gives up
    assert {key: again[key] for key in ("base", "replaced", "moves", "inexact")} == {
        key: whole[key] for key in ("base", "replaced", "moves", "inexact")
    }


def outcome(generation: int, step: int) -> Any:
    plan = SimpleNamespace(step=step, kind="batch", forward=())
    return SimpleNamespace(
        plan=plan, generation=generation, timeline=SimpleNamespace(total_s=1.0, seconds={}), moves=[]
    )


def recovers(store: Any, world: int, ranks: Sequence[int]) -> list[Account]:
    """Ranks that have been through one recovery at step 5; the last of the world is a new process."""
    accounts = []
    for rank in ranks:
        generations = Generations(store, 0)
        generations.begin(1, Fault("death", (world - 1,), "it died"))
        account = Account(generations, rank, world, int(rank == world - 1))
        account.fault(0, 5 * (rank < world - 1), 1, 0.5)
        assert account.went_on(outcome(1, 5), 0) == []
        accounts.append(account)
    return accounts


@pytest.mark.parametrize("tagged", [False, True])
def test_all_ranks_tell_the_same_incident(tagged: bool) -> None:
    store = dist.HashStore()
    accounts = recovers(TaggedStore(store, b"secret of the job") if tagged else store, 3, range(3))
    accounts[1].inexact({"module.x": "it is large"})
    for account in accounts:
        account.good_step()
        assert account.close(5) == []
    found = [incident for account in accounts for incident in account.close(6)]
    assert {(each.number, each.reporter, each.replaced, each.time) for each in found} == {(1, 0, (2,), found[0].time)}
    assert [each.inexact for each in found] == [{"module.x": "it is large"}] * 3
    assert [each.faults[0].text for each in found] == ["it died"] * 3


def test_a_rank_that_has_given_no_account_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account_file, "_WAITS_S", 0.05)
    (account,) = recovers(dist.HashStore(), 3, [1])
    account.good_step()
    (incident,) = account.close(6)
    assert (incident.reporter, incident.replaced) == (1, ())


def test_a_run_that_fails_tells_what_is_known() -> None:
    first, second, _ = recovers(dist.HashStore(), 3, range(3))
    failed = second.failed("no shard is left", 1, 5, 0)
    assert (failed.outcome, failed.reporter, failed.replaced) == ("failed", 1, (2,))
    assert first.failed("no shard is left", 1, 5, 0).reporter == 1
