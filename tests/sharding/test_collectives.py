"""What gloo does when a wait expires: the facts that sharding/collectives.py and devices/gloo.py stand on."""

import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from lightning_replica.core import pending_work
from lightning_replica.devices.gloo import abort_group, is_collective_failure
from lightning_replica.errors import CollectiveError, Interrupted
from tests.support.ranks import open_world, run_ranks
from tests.support.typed import world_group


def late(rank: int, store: Any) -> Any:
    """Rank 1 comes to the collective only when rank 0 has waited for some slices."""
    open_world(rank, store, 2)
    slices = 0

    def check() -> None:
        nonlocal slices
        slices += 1
        if slices == 3:
            store.set("three", "1")

    if rank == 1:
        store.wait(["three"])
    value = torch.tensor([rank + 1.0])
    pending_work.wait(dist.all_reduce(value, async_op=True), check)
    return [float(value), slices]


def test_an_expired_slice_leaves_a_collective_valid() -> None:
    (first, slices), (second, _) = run_ranks(2, late)
    assert first == second == 3.0
    assert slices >= 3


def interrupted(rank: int, store: Any) -> Any:
    open_world(rank, store, 2)
    if rank == 1:
        store.wait(["over"])
        return "never came"

    def check() -> None:
        raise Interrupted("enough")

    try:
        pending_work.wait(dist.all_reduce(torch.ones(1), async_op=True), check)
    except Interrupted:
        abort_group(world_group())
        return "interrupted"
    finally:
        store.set("over", "1")


def test_a_wait_ends_when_the_world_moves_on() -> None:
    assert run_ranks(2, interrupted) == ["interrupted", "never came"]


def point_to_point(rank: int, store: Any) -> Any:
    open_world(rank, store, 2)
    if rank == 1:
        store.wait(["expired"])  # and sends nothing: a send may meet the closing connection and never return
        return True
    work = dist.irecv(torch.zeros(1), 1)
    assert work is not None
    try:
        work.wait(pending_work.SLICE)
    except RuntimeError:
        store.set("expired", "1")
    try:
        work.wait()
    except RuntimeError as error:
        return is_collective_failure(error)
    return "received"


def test_an_expired_slice_of_a_point_to_point_work_closes_the_group() -> None:
    assert run_ranks(2, point_to_point) == [True, True]


def aborted(rank: int, store: Any) -> Any:
    open_world(rank, store, 3)
    if rank == 2:  # never comes
        store.wait(["woken/0", "woken/1"])
        return True
    world = world_group()
    store.set(f"there/{rank}", "1")

    def abort() -> None:
        store.wait(["there/0", "there/1"])
        abort_group(world)

    thread = threading.Thread(target=abort)
    thread.start()
    began = time.monotonic()
    try:
        dist.all_reduce(torch.ones(1))  # blocks in C++, without slices, as a user's own collective would
    except RuntimeError as error:
        store.set(f"woken/{rank}", "1")
        thread.join()
        return is_collective_failure(error) and time.monotonic() - began < 20
    return "went through"


def test_abort_wakes_a_rank_that_is_blocked_in_a_collective() -> None:
    assert run_ranks(3, aborted) == [True, True, True]


def dead_peer(rank: int, store: Any) -> Any:
    import os
    import signal

    open_world(rank, store, 2)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        pending_work.wait(dist.all_reduce(torch.ones(1), async_op=True), lambda: None)
    except CollectiveError as error:
        return str(error)


def test_a_dead_peer_is_a_collective_error() -> None:
    survivor, dead = run_ranks(2, dead_peer)
    assert "onnection" in survivor
    assert dead == {"died": -9}
