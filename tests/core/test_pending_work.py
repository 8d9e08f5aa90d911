"""Collectives that are put in order and asked for in the end."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from lightning_replica.core import pending_work, points
from lightning_replica.core.pending_work import Ordered
from lightning_replica.devices.gloo import abort_group
from lightning_replica.errors import CollectiveError, Interrupted
from tests.support.ranks import open_world, run_ranks
from tests.support.typed import world_group


def late(rank: int, store: Any) -> Any:
    """Rank 1 begins when rank 0 has asked three times whether it still matters."""
    open_world(rank, store, 2)
    asked = 0

    def check() -> None:
        nonlocal asked
        asked += 1
        if asked == 3:
            store.set("three", "1")

    if rank == 1:
        store.wait(["three"])
    values = [torch.tensor([rank + 1.0]), torch.tensor([rank + 5.0])]
    for value in values:
        Ordered(dist.all_reduce(value, async_op=True))
    pending_work.finish(check)
    return [[value.item() for value in values], asked]


def test_finish_waits_for_all_and_looks_meanwhile() -> None:
    (values, asked), (others, _) = run_ranks(2, late)
    assert values == others == [3.0, 11.0]
    assert asked > 3  # and once more in the end


def given_up(rank: int, store: Any) -> Any:
    """Rank 1 does not come before rank 0 has been told that the world moves on."""
    open_world(rank, store, 2)
    if rank == 1:
        store.wait(["given up"])
        dist.all_reduce(torch.ones(1))
        return True
    work = Ordered(dist.all_reduce(torch.ones(1), async_op=True))

    def check() -> None:
        raise Interrupted("the world moves on")

    with pytest.raises(Interrupted):
        pending_work.finish(check)
    assert not pending_work.all_ended(0.05)  # it is remembered, to be seen by whoever closes the group
    store.set("given up", "1")
    work.come_before()
    return True


def test_whoever_gives_up_still_knows_what_has_not_ended() -> None:
    assert run_ranks(2, given_up) == [True, True]


def aborted(rank: int, store: Any) -> Any:
    open_world(rank, store, 2)
    if rank == 1:
        store.wait(["said"])
        return "never came"
    work = Ordered(dist.all_reduce(torch.ones(1), async_op=True))
    abort_group(world_group())
    said = []
    for attempt in (lambda: pending_work.finish(lambda: None), work.come_before):
        try:
            attempt()
        except CollectiveError as error:
            said.append(bool(str(error)))
    store.set("said", "1")
    return said


def test_what_failed_is_said() -> None:
    assert run_ranks(2, aborted) == [[True, True], "never came"]


def no_use(rank: int, store: Any) -> Any:
    """All has ended, but the world has moved on: an abort may have been the end."""
    open_world(rank, store, 2)
    Ordered(dist.all_reduce(torch.ones(1), async_op=True)).come_before()

    def check() -> None:
        raise Interrupted("the world moves on")

    with pytest.raises(Interrupted):
        pending_work.finish(check)
    pending_work.finish(check)  # nothing was ordered since
    return True


def test_the_check_decides() -> None:
    assert run_ranks(2, no_use) == [True, True]


class FailsLate:
    """A collective that fails after one slice has expired."""

    def __init__(self) -> None:
        self.asked = 0

    def wait(self, *_: Any) -> None:
        self.asked += 1
        raise RuntimeError("connection closed")

    def is_completed(self) -> bool:
        return self.asked > 1


def test_a_wait_that_fails_is_over() -> None:
    """User code may catch the error and hang: nobody would see that in a rank that is said to wait."""
    watcher = Mock()
    points.watch(watcher)
    try:
        with pytest.raises(CollectiveError, match="connection closed"):
            pending_work.wait(FailsLate(), lambda: None)  # type: ignore[arg-type]
    finally:
        points.watch(None)
    assert [call[0] for call in watcher.method_calls] == ["waits", "goes_on"]


class Fixed:
    """A collective that has ended, or has not."""

    def __init__(self, ended: bool) -> None:
        self.ended = ended

    def is_completed(self) -> bool:
        return self.ended


def test_a_device_waits_if_the_same_collective_is_under_way_at_two_looks() -> None:
    detector, running, ended, later = pending_work.StallDetector(), Fixed(False), Fixed(True), Fixed(False)
    try:
        assert not detector.is_stalled()
        for each in (running, ended, later):
            Ordered(each)  # type: ignore[arg-type]
        assert [detector.is_stalled() for _ in range(3)] == [False, True, True]
        del pending_work._ordered[0]
        assert [detector.is_stalled() for _ in range(2)] == [False, False]
        del pending_work._ordered[0]
        assert [detector.is_stalled() for _ in range(2)] == [False, True]
    finally:
        pending_work._ordered.clear()
    assert not detector.is_stalled()
