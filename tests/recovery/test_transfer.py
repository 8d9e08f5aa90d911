import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_replica.control.generation import Generations
from lightning_replica.control.monitor import Monitor
from lightning_replica.core import pending_work
from lightning_replica.core.grid import Grid
from lightning_replica.core.options import RecoveryOptions
from lightning_replica.devices.cpu import Cpu
from lightning_replica.devices.interface import Device
from lightning_replica.errors import CollectiveError, RecoveryError, TransferError
from lightning_replica.groups.world import ProcessGroups
from lightning_replica.recovery import transfer
from lightning_replica.recovery.mirror import Mirrors
from lightning_replica.recovery.planner import Move, Plan
from lightning_replica.recovery.recovery import Recovery
from lightning_replica.recovery.transfer import Channel, Tag
from tests.support.accelerators import Apart
from tests.support.ranks import run_ranks

TAG = Tag(job=77, generation=3, step=5)


def wait(work: Any) -> None:
    pending_work.wait(work, lambda: None)


def groups(rank: int, store: Any, world_size: int, device: Device | None = None) -> ProcessGroups:
    opened = ProcessGroups(store, rank, world_size, device or Cpu(), 60)
    opened.open(0, lambda _: ())
    return opened


def damaging(times: float) -> Callable[[], int]:
    """Flips a bit in chunks that this process sends, ``times`` times; returns how often it has."""
    launch, done = Channel._launch, 0

    def damage(self: Channel, tensor: torch.Tensor, root: int) -> Any:
        nonlocal done
        if tensor.dtype == torch.uint8 and root == self._source and done < times:
            done += 1
            tensor = tensor.clone()
            tensor[len(tensor) // 2] ^= 16
        return launch(self, tensor, root)

    Channel._launch = damage  # type: ignore[method-assign]
    return lambda: done


def move(rank: int, store: Any) -> Any:
    transfer.CHUNK_BYTES = 1000
    opened = groups(rank, store, 3)
    plain = {"a": [1, 0.1 + 0.2, math.inf], "b": None, "bytes": b"x" * 3001, 3: (b"", torch.ones(2))}
    tensor = torch.arange(2500, dtype=torch.float64) / 7
    if rank == 0:
        return "not concerned"
    with Channel(2, 1, opened, wait, TAG) as channel:
        if rank == 2:
            channel.send_plain(plain)
            channel.send(torch.zeros(0))
            channel.send(tensor)
            return channel.bytes_moved
        came, received = channel.receive_plain(), torch.zeros(2500, dtype=torch.float64)
        channel.receive(torch.zeros(0))
        channel.receive(received)
        return [
            torch.equal(came.pop(3)[1], torch.ones(2)),
            came == {key: value for key, value in plain.items() if key != 3},
            torch.equal(received, tensor),
            channel.bytes_moved,
        ]


def test_everything_arrives() -> None:
    idle, (*target, received), source = run_ranks(3, move)
    assert idle == "not concerned"
    assert target == [True] * 3
    assert 2500 * 8 + 3001 < source == received < 2500 * 8 + 3001 + 1500


class OnDevice(torch.Tensor):
    """Memory that the host cannot look into."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function is not torch.Tensor.numpy, "not in the host's memory"
        return super().__torch_function__(function, types, args, kwargs)


def move_between_devices(rank: int, store: Any) -> Any:
    transfer.CHUNK_BYTES = 1000
    opened = groups(rank, store, 2, Apart())
    tensor = torch.arange(2500, dtype=torch.float64) / 7
    received = torch.zeros(2500, dtype=torch.float64)
    with Channel(0, 1, opened, wait, TAG) as channel:
        if rank == 0:
            channel.send(tensor.as_subclass(OnDevice))
            channel.send_plain({"a": torch.ones(2)})
            return channel.bytes_moved
        channel.receive(received.as_subclass(OnDevice))
        return [torch.equal(received, tensor), channel.receive_plain()["a"].tolist(), channel.bytes_moved]


def test_a_device_is_reached_through_buffers_of_the_host() -> None:
    sent, (same, plain, received) = run_ranks(2, move_between_devices)
    assert same
    assert plain == [1.0, 1.0]
    assert 20000 < sent == received < 21000  # nothing was sent twice: no buffer was used while it was under way


def spoil(rank: int, store: Any, times: float) -> Any:
    transfer.CHUNK_BYTES = 1000
    opened = groups(rank, store, 2)
    tensor, received = torch.arange(2000.0), torch.zeros(2000)
    with Channel(0, 1, opened, wait, TAG) as channel:
        if rank == 0:
            count = damaging(times)
            channel.send(tensor)
            return count()
        channel.receive(received)
        return torch.equal(received, tensor)


def test_a_damaged_chunk_is_sent_again() -> None:
    assert run_ranks(2, spoil, 10) == [10, True]  # all eight, then two of them again


def test_a_chunk_that_is_damaged_every_time_is_an_error_at_both_ends() -> None:
    source, target = run_ranks(2, spoil, 1e9)
    text = "8 chunks of message 1 from rank 0 to rank 1 (number 0, 1, 2, 3, 4, 5, 6, 7) arrived damaged 3 times."
    assert f"TransferError: {text}" in source["raised"]
    assert f"TransferError: {text}" in target["raised"]


OTHERS = {
    "job 1, not 77": replace(TAG, job=1),
    "generation 2, not 3": replace(TAG, generation=2),
    "step 4, not 5": replace(TAG, step=4),
    "version 0, not 1": replace(TAG, version=0),
    "generation 2, not 3; step 6, not 5": replace(TAG, generation=2, step=6),
}


def mistake(rank: int, store: Any) -> Any:
    opened = groups(rank, store, 2)
    said, untouched = [], torch.zeros(10)

    with Channel(0, 1, opened, wait, TAG) as channel:
        for tag, sent in [*((other, 10) for other in OTHERS.values()), (TAG, 11), (TAG, -1)]:
            if rank == 0:
                channel._tag = tag
                channel._move(channel._header(4 * sent), 0)
                continue
            try:
                channel.receive(untouched)
            except TransferError as error:
                said.append(str(error))
    return [said, untouched.tolist()]


def test_a_message_of_something_else_is_refused_before_anything_is_written() -> None:
    _, (said, untouched) = run_ranks(2, mistake)
    expected = [*OTHERS, "44 bytes, not 40", "-4 bytes, not 40"]
    assert said == [f"Rank 1 refused a message from rank 0: it has {what}." for what in expected]
    assert untouched == [0.0] * 10


class Shard:
    """The least that can be sent and received: `Recoverable`, as far as moves use it."""

    def __init__(self, value: float, before: Callable[[], None]) -> None:
        self.tensor, self.step, self._before = torch.full((100,), value), 5, before

    def export_shard(self) -> Any:
        self._before()
        return {"step": self.step}, [self.tensor]

    def import_shard(self, manifest: Any, receive: Any) -> None:
        receive(self.tensor)
        self.step = manifest["step"]


def recovery(rank: int, store: Any, world_size: int, replicas: int) -> Recovery:
    generations, opened = Generations(store), groups(rank, store, world_size)
    monitor = Monitor(generations, opened.abort, lambda: None)
    return Recovery(
        Grid.of(world_size, replicas),
        rank,
        generations,
        opened,
        monitor,
        Mirrors(rank, wait),
        lambda _: (),
        wait,
        RecoveryOptions(max_tries=2),
    )


def both_at_once(rank: int, store: Any) -> Any:
    """The first move of the plan waits until the second is through."""
    own = recovery(rank, store, 4, 2)

    def before() -> None:
        if rank == 0:
            store.wait(["the other has arrived"])

    shard: Any = Shard(float(rank), before)
    host: Any = None  # it is not asked
    plan = Plan(5, "batch", (), (), (Move(0, 2, False), Move(1, 3, False)))
    for move in plan.moves:
        own._move(move, plan, shard, host)
    if rank == 3:
        store.set("the other has arrived", "1")
    return shard.tensor[0].item()


def test_moves_of_different_ranks_go_on_at_once() -> None:
    assert run_ranks(4, both_at_once) == [0.0, 1.0, 0.0, 1.0]


def distrust(rank: int, store: Any) -> Any:
    own = recovery(rank, store, 2, 2)
    shard: Any = Shard(float(rank), lambda: None)
    host: Any = None  # it is not asked
    plan = Plan(5, "batch", (), (), (Move(0, 1, False),))
    if rank == 0:
        damaging(1e9)
    said = []
    for _ in range(2):
        try:
            own._move(plan.moves[0], plan, shard, host)
        except (TransferError, RecoveryError) as error:
            said.append([type(error).__name__, str(error), list(own._damaged_from)])
    return said


def test_whose_data_arrives_damaged_is_doubted_and_it_ends() -> None:
    _, (first, second) = run_ranks(2, distrust)
    assert (first[0], first[2]) == ("TransferError", [0])
    assert (second[0], second[2]) == ("RecoveryError", [0, 0])
    assert "Rank 1 failed to get its shard 2 times, from ranks 0, 0: 1 chunks of message 1 from rank 0" in second[1]


def reopen(rank: int, store: Any) -> Any:
    import sys

    hook = sys.excepthook
    opened = groups(rank, store, 2)
    for generation in range(1, 4):
        opened.close()
        opened.open(generation, lambda _: ())
        wait(torch.distributed.all_reduce(torch.ones(1), async_op=True))
    opened.close()
    return sys.excepthook is hook and not torch.distributed.is_initialized()


def test_groups_open_and_close_again_and_again() -> None:
    assert run_ranks(2, reopen) == [True, True]


def test_a_group_that_cannot_be_opened() -> None:
    with pytest.raises(CollectiveError, match="Could not open the process groups of generation 0"):
        ProcessGroups(torch.distributed.HashStore(), 0, 2, Cpu(), 0.2).open(0, lambda _: ())
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
