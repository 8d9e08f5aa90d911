import subprocess
import sys
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_replica.control.faults import Fault
from lightning_replica.control.generation import Generations
from lightning_replica.control.monitor import Monitor
from lightning_replica.errors import Interrupted
from tests.support.doubles import overriding


def connect(port: int) -> Generations:
    return Generations(dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=10)))


def test_it_wakes_the_rank_once_a_generation() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    generations = Generations(store)
    woken = threading.Semaphore(0)
    monitor = Monitor(connect(store.port), woken.release, lambda: None, interval_s=0.001)
    monitor.start(0)
    try:
        monitor.check()
        generations.begin(1, Fault("death", (1,), "x"))
        assert woken.acquire(timeout=10)
        assert monitor.over
        with pytest.raises(Interrupted, match="generation 0 is over"):
            monitor.check()
        generations.begin(2, Fault("death", (1,), "y"))
        monitor.moved_to(2)
        monitor.check()
        generations.begin(3, Fault("death", (1,), "z"))
        assert woken.acquire(timeout=10)
        assert not woken.acquire(blocking=False)
    finally:
        monitor.stop()


@overriding(new=("looks",))
class Overtaken(Generations):
    """Has the rank move on by itself just when its monitor has seen that the generation is over."""

    monitor: Monitor
    looks = 0

    def begun(self, generation: int) -> bool:
        self.looks += 1
        found = super().begun(generation)
        if found:
            self.monitor.moved_to(generation)
        return found


def test_a_rank_that_has_moved_on_by_itself_is_not_woken() -> None:
    """Seen on a busy machine: the new generation was taken for over, its groups were aborted while they opened."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    generations = Overtaken(connect(store.port).store)
    woken = threading.Event()
    monitor = generations.monitor = Monitor(generations, woken.set, lambda: None, interval_s=0.001)
    Generations(store).begin(1, Fault("death", (1,), "x"))
    monitor.start(0)
    try:
        while generations.looks < 3 and not woken.is_set():
            threading.Event().wait(0.001)
        monitor.check()
        assert not woken.is_set()
    finally:
        monitor.stop()


def test_a_rank_that_waits_has_it_look_at_once() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    woken = threading.Event()
    monitor = Monitor(connect(store.port), woken.set, lambda: None, interval_s=3600)
    monitor.start(0)
    try:
        Generations(store).begin(1, Fault("exception", (1,), "x"))
        monitor.check_now()
        assert woken.wait(timeout=10)
        with pytest.raises(Interrupted, match="generation 0 is over"):
            monitor.check_now()
    finally:
        monitor.stop()  # nor does it wait here


def test_a_rank_has_itself_woken() -> None:
    """Each time, whether the monitor has seen the end of the generation or not; in another thread; and it has come."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    woken: list[threading.Thread] = []
    monitor = Monitor(
        connect(store.port), lambda: woken.append(threading.current_thread()), lambda: None, interval_s=3600
    )
    monitor.start(0)
    try:
        for times in (1, 2):
            monitor.wake_now()
            assert len(woken) == times
        assert threading.current_thread() not in woken
        with pytest.raises(Interrupted, match="generation 0 is over"):
            monitor.check()
        monitor.moved_to(0)  # those who are left may go on where they were, when the run has ended
        monitor.check()
    finally:
        monitor.stop()
    monitor.wake_now()  # there is nobody to do it
    assert len(woken) == 2


def test_it_notices_that_the_supervisor_is_gone() -> None:
    script = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""
    host = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    orphaned = threading.Event()
    monitor = Monitor(connect(int(host.stdout.readline())), lambda: None, orphaned.set, interval_s=0.001)
    monitor.start(0)
    host.kill()
    host.communicate()
    assert orphaned.wait(timeout=30)
    monitor.stop()
