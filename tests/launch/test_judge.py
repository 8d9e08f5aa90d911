"""Who hangs? By case and by property."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_replica.launch.beacons import HangLimits, Slot
from lightning_replica.launch.hangs import Judge
from lightning_replica.launch.stacks import Finding

LIMITS = HangLimits(10.0, 100.0, 50.0)
NOW = 1000.0


def busy(idle_s: float, limit_s: float = 10.0) -> Slot:
    return Slot(1, 1, False, NOW - idle_s, NOW - idle_s, NOW - idle_s + limit_s)


def waits(since_s: float, silent_s: float = 0.0) -> Slot:
    return Slot(1, 1, True, NOW - since_s, NOW - silent_s, NOW - silent_s + 10.0)


def judge(
    *slots: Slot, judge: Judge | None = None, now: float = NOW, **findings: Finding
) -> tuple[tuple[int, ...], bool]:
    """Culprits, and whether all is stalled; ``r2="busy"`` says what rank 2 is at, if it is overdue."""
    judge = judge or Judge(LIMITS, 1.0)
    world = dict(enumerate(slots))
    found: dict[int, Finding] = {rank: findings.get(f"r{rank}", "busy") for rank in judge.overdue(world, now)}
    return judge.culprits(world, found, now), judge.stalled(world, found, now)


@pytest.mark.parametrize(
    ("slots", "findings", "culprits"),
    [
        # One is past its deadline, others wait for it.
        ([busy(11), waits(9), waits(9)], {}, (0,)),
        ([busy(9), waits(9), waits(9)], {}, ()),
        ([busy(11, limit_s=20), waits(11), waits(11)], {}, ()),
        # Two at once.
        ([busy(11), waits(9), busy(12)], {}, (0, 2)),
        # Another is busy and waits for nobody yet: it may be at the same thing.
        ([busy(11), busy(9), busy(9)], {}, ()),
        ([busy(11), busy(9), waits(1)], {}, (0,)),
        # All are at the same thing: nobody is worse than the others, for as long as the ceiling allows.
        ([busy(11), busy(12), busy(13)], {}, ()),
        ([busy(101), busy(12), busy(103)], {}, (0, 2)),
        # The others stand in a barrier of the user's own; their time-outs have passed as well.
        ([busy(11), busy(11), busy(11)], {"r1": "collective", "r2": "collective"}, (0,)),
        # Somebody who waits has stopped to say so.
        ([waits(20, silent_s=11), waits(9), waits(9)], {"r0": "silent"}, (0,)),
        # Someone debugs: neither a culprit, nor waiting for others.
        ([busy(500), waits(499), waits(499)], {"r0": "debugger"}, ()),
        ([busy(500), busy(11), busy(11)], {"r0": "debugger"}, ()),
        # A single rank.
        ([busy(99)], {}, ()),
        ([busy(101)], {}, (0,)),
        # Not started yet, or outside of training.
        ([Slot(), waits(50), waits(50)], {}, ()),
    ],
)
def test_culprits(slots: list[Slot], findings: dict[str, Any], culprits: tuple[int, ...]) -> None:
    assert judge(*slots, **findings) == (culprits, False)


def test_all_wait_for_each_other() -> None:
    assert judge(waits(11), waits(12), waits(30)) == ((), True)
    assert judge(waits(9), waits(12), waits(30)) == ((), False)
    assert judge(waits(11), busy(11), waits(30), r1="collective") == ((), True)
    assert judge(waits(11), busy(1), waits(30)) == ((), False)


def test_who_does_not_come_when_called_back_is_a_culprit() -> None:
    stuck, other = busy(11), waits(11)
    one = Judge(LIMITS, 1.0)
    assert judge(other, stuck, judge=one, r1="collective") == ((), True)
    one.retried({0: other, 1: stuck}, NOW)
    later = NOW + 9
    other = replace(other, since=NOW + 0.1, written=later, deadline=later + 10)
    assert judge(other, stuck, judge=one, now=later, r1="collective") == ((), False)
    later = NOW + 11
    other = replace(other, written=later, deadline=later + 10)
    assert judge(other, stuck, judge=one, now=later, r1="collective")[0] == (1,)
    came = replace(stuck, since=NOW + 0.2, written=NOW + 0.2, deadline=NOW + 10.2)
    assert judge(other, came, judge=one, now=later, r1="collective")[0] == ()


def test_while_all_sleep_nobody_hangs() -> None:
    """The whole process group was stopped for an hour."""
    one = Judge(LIMITS, 1.0)
    one.looks(NOW)
    later = NOW + 3600
    one.looks(later)
    slots = busy(5), waits(5), waits(4)
    assert judge(*slots, judge=one, now=later) == ((), False)
    assert one.overdue(dict(enumerate(slots)), later + 3) == ()
    assert one.overdue(dict(enumerate(slots)), later + 7) == (0,)
    fresh = {0: replace(busy(0), since=later + 1, written=later + 1, deadline=later + 11)}
    assert one.overdue(fresh, later + 10.9) == ()  # nothing is forgiven to who came back
    assert one.overdue(fresh, later + 11.1) == (0,)


slots_of_ranks = st.lists(
    st.builds(
        lambda idle_s, limit_s, waiting: replace(busy(idle_s, limit_s), waiting=waiting),
        st.floats(0, 300),
        st.floats(10, 100) | st.just(math.inf),
        st.booleans(),
    ),
    min_size=1,
    max_size=5,
)


@given(slots_of_ranks, st.lists(st.sampled_from(["busy", "silent", "collective", "debugger"]), min_size=5, max_size=5))
def test_nobody_is_blamed_without_a_reason(slots: list[Slot], found: list[Finding]) -> None:
    findings: dict[str, Any] = {f"r{rank}": finding for rank, finding in enumerate(found)}
    culprits, stalled = judge(*slots, **findings)
    for rank in culprits:
        assert slots[rank].deadline < NOW
        assert found[rank] in ("busy", "silent")
    if len(culprits) == len(slots):
        assert all(NOW - slot.since > LIMITS.max_s for slot in slots)
    assert not (culprits and stalled)
