"""Ranges in profiles."""

import pytest
from torch.profiler import ProfilerActivity, profile

from lightning_replica.core.ranges import Range, ranged


@ranged("work")
def work(x: int, by: int = 1) -> int:
    """Adds."""
    return x + by


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch 2.11 and 2.12
def test_a_call_is_in_the_profile() -> None:
    assert (work(1, by=2), work.__doc__) == (3, "Adds.")
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        assert work(1) == 2
    assert [event.name for event in profiled.events()] == ["replica_zero::work"]


def test_a_range_ends_where_the_next_begins() -> None:
    phases = Range()
    phases.begin("before")  # nobody profiles: it is not seen, and does not disturb
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        phases.begin("stop")
        phases.begin("clean")
        phases.end()
        phases.end()
    first, second = profiled.events()
    assert (first.name, second.name) == ("replica_zero::stop", "replica_zero::clean")
    assert first.time_range.end <= second.time_range.start
