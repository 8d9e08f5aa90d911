"""Packed flags add up over ranks without a carry from one parameter into the next."""

from hypothesis import given
from hypothesis import strategies as st

from lightning_replica.sharding import usage


@given(st.integers(1, 5000), st.data())
def test_flags_of_all_ranks_add_up(world_size: int, data: st.DataObject) -> None:
    number = data.draw(st.integers(0, 120))
    kinds = data.draw(st.lists(st.lists(st.booleans(), min_size=number, max_size=number), min_size=1, max_size=3))
    total = [0.0] * len(usage.pack([False] * number, world_size))
    for rank in range(world_size):
        total = [a + b for a, b in zip(total, usage.pack(kinds[rank % len(kinds)], world_size), strict=True)]
    expected = [any(flags) for flags in zip(*kinds[:world_size], strict=True)]
    assert usage.unpack(total, number, world_size) == expected
