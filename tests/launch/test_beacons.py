"""What a rank writes, what the supervisor reads of it, and how time-outs are learnt."""

import math
import multiprocessing
import os
import pdb
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_replica.core import points
from lightning_replica.core.pending_work import wait
from lightning_replica.launch import beacons, stacks
from lightning_replica.launch.beacons import POSITIONS, Beacon, Beacons, HangLimits, Learnt, Slot
from tests.support.forked import context

LIMITS = HangLimits(1.0, 100.0, 30.0)


@pytest.fixture
def block() -> tuple[Beacons, str]:
    made = beacons.create(3)
    assert made is not None
    return made


@pytest.fixture
def rank_1(block: tuple[Beacons, str]) -> Iterator[Beacon]:
    beacon = Beacon(block[1], 1, LIMITS, stacks=7)
    points.watch(beacon)
    yield beacon
    points.watch(None)


@given(st.lists(st.tuples(st.floats(0, 1e4), st.booleans())), st.floats(0.1, 50), st.floats(50, 1e4))
def test_five_times_the_longest_once_a_place_is_known(
    seen: list[tuple[float, bool]], least_s: float, most_s: float
) -> None:
    learnt = Learnt(least_s, most_s, first_s=most_s)
    for busy_s, passed in seen:
        learnt.saw(busy_s, passed)
    known = sum(passed for _, passed in seen) >= 3
    longest_s = max((busy_s for busy_s, _ in seen), default=0.0)
    assert learnt.limit_s == (min(max(5 * longest_s, least_s), most_s) if known else most_s)


def test_a_point_is_seen_by_the_supervisor_and_by_nobody_else(block: tuple[Beacons, str], rank_1: Beacon) -> None:
    before = time.monotonic()
    points.reach("update")
    slot = block[0].slot(1)
    assert before <= slot.since == slot.written <= time.monotonic()
    assert (slot.count, POSITIONS[slot.position], slot.waiting) == (1, "update", False)
    assert slot.deadline == slot.written + 100.0
    assert (slot.process, slot.stacks, slot.thread) == (os.getpid(), 7, threading.main_thread().ident)
    # Fresh memory is zero: a rank that has not been started yet is nobody's business.
    assert [block[0].slot(rank) for rank in (0, 2)] == [Slot(deadline=0.0, stacks=0, step=0)] * 2


def test_a_wait_is_renewed_and_does_not_count(block: tuple[Beacons, str], rank_1: Beacon) -> None:
    class Work:
        """Done at the third look, each of which takes some time."""

        looks = 0

        def wait(self, _: object) -> None:
            self.looks += 1
            seen.append(block[0].slot(1))
            if self.looks < 3:
                time.sleep(0.02 if self.looks == 1 else 0.5)
                raise RuntimeError("timeout")

        def is_completed(self) -> bool:
            return False

    seen: list[Slot] = []
    for _ in range(4):
        points.reach("gather")
        wait(Work(), lambda: None)  # type: ignore[arg-type]
    after = block[0].slot(1)
    first, second, third = seen[-3:]
    assert [slot.waiting for slot in (first, second, third, after)] == [False, True, True, False]
    assert second.since == third.since < third.written  # one wait, renewed
    assert (second.count, third.count, after.count) == (first.count + 1, first.count + 1, first.count + 2)
    assert third.deadline == third.written + LIMITS.min_s
    assert first.deadline == first.written + LIMITS.min_s  # the fourth time: learnt
    assert rank_1._learnt[POSITIONS.index("gather")]._longest_s < 0.4  # the wait itself is longer


def test_recovery_has_a_limit_of_its_own(block: tuple[Beacons, str], rank_1: Beacon) -> None:
    points.reach("regroup")
    slot = block[0].slot(1)
    assert slot.deadline - slot.written == pytest.approx(30.0)


def test_a_new_process_gets_a_fresh_slot(block: tuple[Beacons, str], rank_1: Beacon) -> None:
    points.reach("update")
    block[0].reset(1, 5.0, 35.0)
    assert block[0].slot(1) == Slot(since=5.0, written=5.0, deadline=35.0)
    block[0].reset(1, 5.0, math.inf)
    assert block[0].slot(1).deadline == math.inf


def holds(lock: threading.Lock) -> None:
    lock.acquire()
    lock.acquire()


def rank(mode: str, sender: Any) -> None:
    file = stacks.answer()
    threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
    sender.send((os.getpid(), file, threading.main_thread().ident))
    if mode == "pdb":
        nobody_types, _ = os.pipe()
        with os.fdopen(nobody_types) as stdin, open(os.devnull, "w") as stdout:
            pdb.Pdb(stdin=stdin, stdout=stdout).set_trace()
            time.sleep(100)
    holds(threading.Lock())


@pytest.mark.parametrize("mode", ["busy", "stopped", "gone", "pdb"])
def test_asking_a_process_for_its_stacks(mode: str) -> None:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = context().Process(target=rank, args=(mode, sender))
    process.start()
    try:
        pid, file, thread = receiver.recv()
        function = {"pdb": "cmdloop"}.get(mode, "holds")
        slot = Slot(process=pid, stacks=file, thread=thread)

        def ask() -> stacks.Stack:
            return stacks.collect({4: slot}, lambda _: os.kill(pid, stacks.SIGNAL))[4]

        while mode != "gone" and function not in ask().text:
            pass
        if mode == "stopped":
            os.kill(pid, signal.SIGSTOP)
        if mode == "gone":
            process.kill()
            process.join()
        stack = ask()
        assert stack.finding == {"busy": "busy", "pdb": "debugger"}.get(mode, "silent")
        if mode == "busy":
            assert [frame.function for frame in stack.frames[:2]] == ["holds", "rank"]
            assert stack.text.count("hread 0x") == 2
        assert {"stopped": "stopped by a signal", "gone": "it did not answer", "pdb": "pdb.py"}.get(
            mode, "holds"
        ) in stack.describe()
    finally:
        process.kill()
        process.join()
        receiver.close()
        sender.close()


def test_a_wait_of_torch_is_told_by_its_line() -> None:
    text = f"""Thread 0x00007f0000000001 (most recent call first):
  File "/x/threading.py", line 324 in wait

Current thread 0x00007f0000000002 (most recent call first):
  File "{__file__}", line %d in user
"""
    lines = Path(__file__).read_text().splitlines()
    waits = next(number for number, line in enumerate(lines, 1) if "wait(Work()" in line)
    frames = stacks.parse(text % waits, 0x7F0000000002)
    assert [(frame.function, frame.line) for frame in frames] == [("user", waits)]
    assert stacks.parse(text % waits, 0x7F0000000001)[0].function == "wait"
    assert stacks.parse(text % waits, 0x7F0000000003) == ()
