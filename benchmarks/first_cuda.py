"""Asks NCCL and CUDA, on a machine with a GPU, the questions on which this package relies.

    python benchmarks/first_cuda.py                 # two ranks share a GPU; 9 minutes at most
    python benchmarks/first_cuda.py --gpus 2        # each rank has a GPU of its own
    python benchmarks/first_cuda.py --checks-only --only aborts_at_once aborts_in_turn

The answers go into first_cuda.md. PASS and FAIL stand where the package needs something. INFO stands where a check only
writes down what torch, NCCL or CUDA do, for example why the package goes another way. After the checks, the tests that
need a GPU run. The exit code is 0 if nothing has failed and everything was reached, and 2 if there is no GPU.

[Note: two ranks on one GPU]
NCCL refuses that, unless it takes the ranks for two hosts. It then sends through sockets, where it learns of a peer's
death from the connection, as between machines. What only P2P does needs ``--gpus 2``.

[Note: warm ranks]
NCCL connects two ranks when they first exchange something, and CUDA loads a kernel when it is first launched. Both may
block behind a collective that hangs. So a check that asks for something else does both before anything hangs.
"""

import argparse
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date, timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]  # where there is a GPU, the package may not be installed
from common import machine

from lightning_replica._compat.torch import backend_of
from lightning_replica.core import pending_work
from lightning_replica.core.grid import Grid
from lightning_replica.devices.cuda import _VARIABLES, Cuda
from lightning_replica.groups.membership import make_groups
from lightning_replica.sharding.commit import Request
from lightning_replica.sharding.settings import EngineSettings
from lightning_replica.sharding.state import ShardedState

TESTS = (
    *("tests/devices/test_cuda.py", "tests/faults/test_buffers.py::test_on_one_gpu"),
    # The next ones are written for any accelerator, and run on CPUs elsewhere.
    *(f"tests/faults/test_{name}.py" for name in ("zoo", "own_states", "pruning", "data_module", "random_trainings")),
)
HOST = "127.0.0.1"
MARK = "FOUND "
TAIL = 20  # lines of a rank's output, where a check has failed
POLL_S = 0.005
MANY, FEW = 2**22, 2**16  # elements
DUMP_KEYS = ["exception_dump", "groups/exception_dump"]  # of torch's watchdog; which one depends on its version

# See [Note: two ranks on one GPU].
ON_ONE_GPU = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
}


# What a rank of a check uses


def note(**figures: object) -> None:
    """Tell the parent. What was said before a process dies or hangs counts, too."""
    print(f"\n{MARK}{json.dumps(figures, default=str)}", flush=True)


def stay_away() -> NoReturn:
    """Be the rank that others wait for, until the parent ends this process."""
    while True:
        time.sleep(60)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Call:
    """A call in a thread of its own, since it may never return."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.failure: Exception | None = None
        self._began = time.monotonic()
        self._ended = self._began
        self._thread = threading.Thread(target=self._run, args=(function,), daemon=True)
        self._thread.start()

    def _run(self, function: Callable[[], object]) -> None:
        try:
            function()
        except Exception as error:
            self.failure = error
        self._ended = time.monotonic()

    def within(self, limit_s: float) -> "Call":
        """Wait for its end, but no longer than ``limit_s``."""
        self._thread.join(limit_s)
        return self

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    @property
    def succeeded(self) -> bool:
        return self.ended and self.failure is None

    @property
    def seconds(self) -> float:
        return (self._ended if self.ended else time.monotonic()) - self._began

    def __str__(self) -> str:
        if self.succeeded:
            return f"{self.seconds:.2f} s"
        if not self.ended:
            return f"has not ended in {self.seconds:.0f} s"
        return f"{self.seconds:.2f} s, {type(self.failure).__name__}: {first_line(self.failure)}"


def first_line(error: object) -> str:
    return next(iter(str(error).splitlines()), "")[:160]


class Ticks:
    """A thread that needs the GIL every 20 ms, as the package's monitor does."""

    def __init__(self) -> None:
        self.longest_gap_s = 0.0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        last = time.monotonic()
        while True:
            time.sleep(0.02)
            now = time.monotonic()
            self.longest_gap_s = max(self.longest_gap_s, now - last)
            last = now


class Rank:
    """One rank of a check."""

    def __init__(self, number: int, size: int, port: int, gpus: int) -> None:
        self.number, self.size = number, size
        self.device = torch.device("cuda", number % gpus)
        torch.cuda.set_device(self.device)
        self.store = dist.TCPStore(HOST, port, is_master=False, timeout=timedelta(seconds=60))
        self._met = 0

    def open(self, groups: int = 1) -> list[dist.ProcessGroup]:
        """Open groups of all ranks, whose communicators connect later."""
        store = dist.PrefixStore("groups", self.store)
        dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=self.number, world_size=self.size)
        return [dist.new_group(list(range(self.size))) for _ in range(groups)]

    def open_warm(self, groups: int = 1) -> list[dist.ProcessGroup]:
        """Open groups that are connected, and load the kernels. See [Note: warm ranks]."""
        opened = self.open(groups)
        values = self.values()
        for group in opened:
            dist.all_to_all_single(self.values(), values, group=group)
            dist.all_reduce(values, group=group)
        self.values(FEW).mul_(1.0)
        torch.cuda.synchronize()
        self.meet()
        return opened

    def values(self, count: int = MANY) -> Tensor:
        return torch.ones(count, device=self.device)

    def meet(self) -> None:
        """Wait until all ranks are here."""
        self._met += 1
        key = f"met/{self._met}"
        self.store.add(key, 1)
        while self.store.add(key, 0) < self.size:
            time.sleep(POLL_S)

    def hang(self, group: dist.ProcessGroup) -> None:
        """Begin an all-reduce that no other rank joins; what this thread launches later comes behind it."""
        begun(dist.all_reduce(self.values(), group=group, async_op=True)).wait()

    def connect(self, group: dist.ProcessGroup) -> None:
        """Connect all ranks of ``group``, in the way of the package."""
        is_connected = Cuda(self.device.index).connect(group)
        while not is_connected():
            time.sleep(POLL_S)

    def nccl(self, group: dist.ProcessGroup) -> Any:
        return backend_of(group, self.device)

    def aborts(self, groups: Sequence[dist.ProcessGroup], limit_s: float) -> list[Call]:
        """Abort all communicators at once."""
        calls = [Call(self.nccl(group).abort) for group in groups]
        return [call.within(limit_s) for call in calls]

    def synchronize(self) -> Call:
        return Call(partial(torch.cuda.synchronize, self.device)).within(10)


def begun(work: Any) -> Any:
    """Return the work of a collective, which torch gives to ranks of the group only."""
    assert work is not None
    return work


# The checks: True if what the package needs holds


def versions(rank: Rank) -> None:
    properties = torch.cuda.get_device_properties(rank.device)
    note(
        gpu=properties.name,
        gpus=torch.cuda.device_count(),
        free_GiB=round(torch.cuda.mem_get_info()[0] / 2**30, 1),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        nccl=".".join(map(str, torch.cuda.nccl.version())),
        can_connect_eagerly=hasattr(dist.ProcessGroupNCCL, "eager_connect_single_device"),
    )


def collectives_of_a_step(rank: Rank) -> bool:
    (group,) = rank.open()
    first = 4.0 * rank.number
    wanted = {
        exchange: [first, first + 1, first + 2, first + 3, first + 100, first + 101, first + 102, first + 103],
        gather_pieces_that_lie_apart: [1.0] * 4 + [0.0] * 4 + [2.0] * 4,
        gather_pieces_that_lie_together: [1.0] * 4 + [2.0] * 4,
        add_up: [2.0],
    }
    found = {function: function(rank, group) for function in wanted}
    note(wrong={function.__name__: found[function] for function in wanted if found[function] != wanted[function]})
    return found == wanted


def exchange(rank: Rank, group: dist.ProcessGroup) -> list[float]:
    sent = torch.arange(8.0, device=rank.device) + 100 * rank.number
    received = torch.empty(8, device=rank.device)
    begun(dist.all_to_all_single(received, sent, group=group, async_op=True)).wait()
    found: list[float] = received.tolist()
    return found


def gather_pieces_that_lie_apart(rank: Rank, group: dist.ProcessGroup) -> list[float]:
    """Gather in place, with a gap between the pieces."""
    flat = torch.zeros(12, device=rank.device)
    pieces = [flat[0:4], flat[8:12]]
    pieces[rank.number].fill_(rank.number + 1.0)
    begun(dist.all_gather(pieces, pieces[rank.number], group=group, async_op=True)).wait()
    found: list[float] = flat.tolist()
    return found


def gather_pieces_that_lie_together(rank: Rank, group: dist.ProcessGroup) -> list[float]:
    flat = torch.zeros(8, device=rank.device)
    own = flat[4 * rank.number :][:4]
    own.fill_(rank.number + 1.0)
    begun(dist.all_gather_into_tensor(flat, own, group=group, async_op=True)).wait()
    found: list[float] = flat.tolist()
    return found


def add_up(rank: Rank, group: dist.ProcessGroup) -> list[float]:
    total = rank.values(1)
    begun(dist.all_reduce(total, group=group, async_op=True)).wait()
    found: list[float] = total.tolist()
    return found


def broadcast_of_a_transposed_tensor(rank: Rank) -> bool:
    (group,) = rank.open()
    values = torch.arange(15.0, device=rank.device).reshape(3, 5).t()
    sent = values if rank.number == 0 else torch.zeros(3, 5, device=rank.device).t()
    try:
        begun(dist.broadcast(sent, 0, group=group, async_op=True)).wait()
    except (RuntimeError, ValueError) as error:
        note(refused=first_line(error))
        return True
    is_right = torch.equal(sent, values)
    note(arrives_as_it_was_sent=is_right)
    return is_right


def abort_of_one_collective(rank: Rank) -> bool:
    (group,) = rank.open_warm()
    if rank.number:
        stay_away()
    work = begun(dist.all_reduce(rank.values(), group=group, async_op=True))
    time.sleep(1)
    (abort,) = rank.aborts([group], 20)
    synchronized = rank.synchronize()
    note(abort=abort, synchronize=synchronized, completed=work.is_completed())
    return abort.succeeded and synchronized.succeeded


def aborts_at_once(rank: Rank, behind: int = 0) -> bool:
    groups, queue = two_collectives_hang(rank, behind)
    aborts = rank.aborts(groups, 12)
    queue.within(5)
    synchronized = rank.synchronize()
    note(aborts=list(map(str, aborts)), queue=queue, synchronize=synchronized)
    return all(call.succeeded for call in [*aborts, queue, synchronized])


def aborts_in_turn(rank: Rank) -> None:
    (first, second), _ = two_collectives_hang(rank, behind=0)
    abort = Call(rank.nccl(first).abort).within(12)
    note(first_alone=abort)
    note(second=Call(rank.nccl(second).abort).within(12), first=abort.within(5))
    note(synchronize=rank.synchronize())


def two_collectives_hang(rank: Rank, behind: int) -> tuple[list[dist.ProcessGroup], Call]:
    """Hang in one collective, and queue another behind it, and kernels behind that.

    Returns:
        The groups of the collectives, and the call that launches the kernels, which blocks when the queue is full.
    """
    groups = rank.open_warm(2)
    values, received = rank.values(), rank.values()
    if rank.number:
        stay_away()
    rank.hang(groups[0])
    begun(dist.all_to_all_single(received, values, group=groups[1], async_op=True)).wait()
    queue = Call(lambda: [received.mul_(1.0) for _ in range(behind)])
    return groups, queue.within(2)


def peer_dies(rank: Rank) -> bool:
    (group,) = rank.open_warm()
    if rank.number:
        time.sleep(1)
        die()
    rank.hang(group)
    time.sleep(8)  # until torch's watchdog has seen it
    note(exception_dump_in_the_store=any(rank.store.check([key]) for key in DUMP_KEYS))
    (abort,) = rank.aborts([group], 30)
    note(abort=abort)
    shutdown = Call(group.shutdown).within(75)
    note(shutdown=shutdown)
    computed = Call(lambda: rank.values().sum().item()).within(10)  # an access to a dead peer's memory would be sticky
    note(computes_afterwards=computed)
    return all(call.succeeded for call in (abort, shutdown, computed)) and shutdown.seconds < 5


def old_exception_dump(rank: Rank) -> bool:
    """Find what a process has left in the store that died earlier."""
    for key in DUMP_KEYS:
        rank.store.set(key, "1")
    rank.open_warm()
    time.sleep(30)
    note(lives_after="30 s")
    return True


def peer_dies_while_connecting(rank: Rank) -> bool:
    (group,) = rank.open()
    rank.meet()
    if rank.number:
        die()
    connecting = Call(partial(rank.connect, group)).within(3)
    note(connecting=connecting)
    (abort,) = rank.aborts([group], 20)
    note(abort=abort, connecting_after_the_abort=connecting.within(3))
    alone = Call(partial(work_alone, rank)).within(20)
    note(another_group=alone)
    return abort.succeeded and alone.succeeded


def work_alone(rank: Rank) -> None:
    """Open a group that has no other rank, and use it."""
    torch.cuda.set_device(rank.device)
    group = dist.new_group([rank.number], use_local_synchronization=True)
    rank.connect(group)
    dist.all_reduce(rank.values(), group=group)
    torch.cuda.synchronize(rank.device)


def peer_died_before_a_first_collective(rank: Rank) -> None:
    (group,) = rank.open()
    rank.meet()
    if rank.number:
        die()
    time.sleep(1)
    first_collective(rank, group, "all_reduce")


def first_collective_after_connecting(rank: Rank, kind: str) -> bool:
    (group,) = rank.open()
    rank.connect(group)
    rank.meet()
    if rank.number:
        die()
    time.sleep(1)
    return first_collective(rank, group, kind)


def first_collective_without_an_exchange(rank: Rank) -> None:
    """Leave out the second half of what the package does to connect."""
    (group,) = rank.open()
    rank.nccl(group).eager_connect_single_device(rank.device)
    rank.meet()
    if rank.number:
        die()
    time.sleep(1)
    first_collective(rank, group, "all_to_all")


def first_collective(rank: Rank, group: dist.ProcessGroup, kind: str) -> bool:
    """Begin a collective of a kind that the communicator has not seen, without a peer; return whether an abort ends it."""
    values, received = rank.values(), rank.values(2 * MANY)
    begin: dict[str, Callable[[], object]] = {
        "all_gather": lambda: dist.all_gather_into_tensor(received, values, group=group, async_op=True),
        "all_reduce": lambda: dist.all_reduce(values, group=group, async_op=True),
        "all_to_all": lambda: dist.all_to_all_single(received[:MANY], values, group=group, async_op=True),
        "broadcast": lambda: dist.broadcast(values, 1, group=group, async_op=True),
    }
    collective = Call(begin[kind]).within(4)
    note(collective=collective)
    (abort,) = rank.aborts([group], 15)
    note(abort=abort, collective_after_the_abort=collective.within(5))
    synchronized = rank.synchronize()
    note(synchronize=synchronized)
    return abort.succeeded and collective.ended and synchronized.succeeded


def nonblocking_communicators(rank: Rank) -> None:
    (group,) = rank.open()
    nccl = rank.nccl(group)
    connecting = Call(partial(nccl.eager_connect_single_device, rank.device)).within(3)
    rank.meet()
    if rank.number:
        stay_away()
    time.sleep(3)
    note(connecting=connecting, is_initialized=nccl._is_initialized())
    first_collective(rank, group, "all_reduce")


def wait_with_a_timeout(rank: Rank) -> None:
    (group,) = rank.open_warm()
    if rank.number:
        stay_away()
    work = begun(dist.all_reduce(rank.values(), group=group, async_op=True))
    waited = Call(partial(work.wait, timedelta(milliseconds=20))).within(15)
    note(wait=waited, completed=work.is_completed())


def kernel_that_hangs(rank: Rank) -> bool:
    torch.cuda._sleep(int(16e9))  # some 8 s
    event = torch.cuda.Event()
    event.record()
    synchronizing = Call(partial(torch.cuda.synchronize, rank.device))
    polls = polls_within(3, event)
    note(polls_in_3_s=polls, synchronizing=synchronizing)
    hung = not synchronizing.ended
    note(synchronized=synchronizing.within(20))
    return hung and polls > 100 and synchronizing.succeeded


def polls_within(limit_s: float, event: torch.cuda.Event) -> int:
    """Return how often the host can ask for an event that does not come."""
    polls, deadline = 0, time.monotonic() + limit_s
    while time.monotonic() < deadline and not event.query():
        polls += 1
        time.sleep(POLL_S)
    return polls


def full_queue(rank: Rank, compiled: bool = False) -> bool:
    (group,) = rank.open_warm()
    values, launched = rank.values(FEW), [0]
    function = torch.compile(little_work) if compiled else little_work
    function(values)
    torch.cuda.synchronize()
    rank.meet()
    if rank.number:
        stay_away()
    ticks = Ticks()
    rank.hang(group)
    note(launching="begins")
    launching = Call(partial(launch_many, function, values, launched)).within(6)
    note(launched_until_full=launched[0], longest_gap=f"{ticks.longest_gap_s:.2f} s")
    (abort,) = rank.aborts([group], 15)
    note(abort=abort, launching=launching.within(10), launched=launched[0])
    return ticks.longest_gap_s < 1 and abort.succeeded and launching.succeeded


def little_work(values: Tensor) -> Tensor:
    return values * 1.0001 + 0.1


def launch_many(function: Callable[[Tensor], Tensor], values: Tensor, launched: list[int]) -> None:
    for _ in range(6000):  # more than any queue holds
        function(values)
        launched[0] += 1


def new_kernel_while_a_collective_hangs(rank: Rank) -> None:
    (group,) = rank.open_warm()
    values = torch.empty(100, device=rank.device)
    if rank.number:
        stay_away()
    ticks = Ticks()
    begun(dist.all_reduce(rank.values(), group=group, async_op=True))  # nothing waits for it
    launching = Call(values.erfinv_).within(5)
    note(launching=launching, longest_gap=f"{ticks.longest_gap_s:.2f} s")
    (abort,) = rank.aborts([group], 15)
    note(abort=abort, launching_after_the_abort=launching.within(5))


def device_side_assertion(rank: Rank) -> bool:
    (group,) = rank.open_warm()
    three, valid, invalid = (torch.tensor(numbers, device=rank.device) for numbers in ([0.0] * 3, [1], [7]))
    three[valid]  # loads the kernel
    torch.cuda.synchronize()
    rank.meet()
    if rank.number:
        stay_away()
    begun(dist.all_reduce(rank.values(), group=group, async_op=True))
    with torch.cuda.stream(torch.cuda.Stream(rank.device)):  # not behind the collective
        three[invalid]
    time.sleep(3)
    (abort,) = rank.aborts([group], 15)
    note(abort=abort)
    synchronized = rank.synchronize()
    fault = None if synchronized.failure is None else Cuda(rank.device.index).classify(synchronized.failure)
    note(synchronize=synchronized, the_package_says=fault)
    return abort.ended and fault is not None and fault.level == "lost"


def ten_generations(rank: Rank) -> bool:
    rank.open(0)
    rows = [generation(rank) for _ in range(10)]
    note(**{name: [row[name] for row in rows] for name in rows[0]})
    return rows[1]["free_MiB"] - rows[-1]["free_MiB"] < 200


def generation(rank: Rank) -> dict[str, float]:
    """Open three groups, use them, and close them; return what that took, and what the process has afterwards."""
    began = time.monotonic()
    groups = [dist.new_group(list(range(rank.size))) for _ in range(3)]
    for group in groups:
        dist.all_reduce(rank.values(), group=group)
    torch.cuda.synchronize()
    opened = time.monotonic()
    rank.aborts(groups, 30)
    for group in groups:
        group.shutdown()
    closed = time.monotonic()
    rank.meet()
    torch.cuda.empty_cache()
    return {
        "open_s": round(opened - began, 2),
        "close_s": round(closed - opened, 2),
        "free_MiB": torch.cuda.mem_get_info()[0] >> 20,
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
    }


HOLD_MEMORY = """
import sys, time, torch
held = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print("held", flush=True)
time.sleep(60)
"""


def memory_of_a_killed_process(rank: Rank) -> bool:
    size = torch.cuda.mem_get_info()[0] // 2
    holder = subprocess.Popen([sys.executable, "-c", HOLD_MEMORY, str(size)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    if not holder.stdout.readline():
        raise RuntimeError(f"no process could get {size >> 20} MiB")
    before, began = torch.cuda.mem_get_info()[0], time.monotonic()
    holder.kill()
    while not (back := torch.cuda.mem_get_info()[0] - before >= size) and time.monotonic() < began + 30:
        time.sleep(POLL_S)
    seconds = time.monotonic() - began
    note(GiB=round(size / 2**30, 1), back=back, after=f"{seconds:.2f} s")
    return back and seconds < 10


# What a step costs the host


LAYERS, WIDTH, LENGTH, TOKENS = 24, 2048, 2048, 50304
WORLD, REPLICAS = 8, 2


def cost_of_a_step(rank: Rank) -> None:
    """Measure one rank of eight, with a GPT of full size; torch's fake group stands for the others."""
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    # The work of the fake group never ends.
    with mock.patch.multiple(pending_work, _await_end=lambda work, check: None, failure_of=lambda work: None):
        for mebibytes in (16, 64, 128):
            note(**{f"buckets of {mebibytes} MiB": cost_with_buckets(mebibytes * 2**20, rank.device)})
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    note(clipping_and_update_of_DDP=f"{clipping_and_update_ms(rank.device):.1f} ms")


def gpt(device: torch.device) -> list[nn.Parameter]:
    """Return 1.3 billion parameters."""
    width = WIDTH
    norm = [(width,), (width,)]
    attention = [(3 * width, width), (3 * width,), (width, width), (width,)]
    mlp = [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    shapes = [(TOKENS, width), (LENGTH, width), *[*norm, *attention, *norm, *mlp] * LAYERS, *norm]
    return [nn.Parameter(torch.randn(shape, device=device) * 0.02) for shape in shapes]


class Parts:
    """Milliseconds of the parts of a step: until the host has launched all, and until the GPU has done all."""

    def __init__(self) -> None:
        self.host_and_total_ms: dict[str, tuple[float, float]] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        torch.cuda.synchronize()
        began = time.perf_counter()
        yield
        launched = time.perf_counter()
        torch.cuda.synchronize()
        ended = time.perf_counter()
        self.host_and_total_ms[name] = (round(1e3 * (launched - began), 1), round(1e3 * (ended - began), 1))


def cost_with_buckets(bucket_bytes: int, device: torch.device) -> dict[str, object]:
    parameters = gpt(device)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    grid = Grid(tuple(range(WORLD)), REPLICAS)
    settings = EngineSettings(bucket_bytes=bucket_bytes, shared_memory=False)
    state = ShardedState([grid], 0, parameters, [optimizer], settings)
    state.connect(make_groups(grid, 0, timedelta(seconds=60), on_host=False), lambda: None)
    gradients = {parameter: torch.zeros_like(parameter) for parameter in parameters}
    parts = Parts()
    for _ in range(4):
        make_step(state, gradients, parts)
    waits = waits_for_the_gpu(partial(make_step, state, gradients, Parts()))
    make_step(state, gradients, parts)
    found: dict[str, object] = {
        "number": sum(len(buffers.layout.buckets) for buffers in state.buffers),
        "host and total ms": parts.host_and_total_ms,
        "waits for the GPU": waits,
        "peak GiB": round(torch.cuda.max_memory_allocated() / 2**30, 1),
    }
    state.release()
    return found


def make_step(state: ShardedState, gradients: dict[nn.Parameter, Tensor], parts: Parts) -> None:
    """Make the calls of a trainer, in its order; only the passes of the model are left out."""
    with parts.part("begin"):
        pending_work.finish(lambda: None)
        state.begin_window(weights_may_differ=False)
    with parts.part("hooks"):
        state.before_backward(reduce=True)
        for parameter, gradient in reversed(gradients.items()):
            accumulate(parameter, gradient)
        state.reduce()
    with parts.part("digest"):
        pending_work.finish(lambda: None)
        state.digest()
    with parts.part("vote"):
        vector = state.part_of_commit(Request(clip_norm=1.0))
    with parts.part("commit"):
        state.commit(vector)
    with parts.part("update"):
        state.update()
    with parts.part("gather"):
        state.gather()


def accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Do what a backward pass does at its end for each parameter."""
    parameter.grad = gradient
    hooks: Mapping[int, Callable[[Tensor], None]] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    for hook in list(hooks.values()):
        hook(parameter)


def waits_for_the_gpu(step: Callable[[], None]) -> dict[str, int]:
    """Return how often the host waits in a step, by the name of the call."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        step()
    names = Counter(event.name for event in profiler.events() or ())
    names.pop("cudaDeviceSynchronize", None)  # that of `Parts`
    return {name: count for name, count in names.items() if "Synchronize" in name or "DtoH" in name}


def clipping_and_update_ms(device: torch.device) -> float:
    parameters = gpt(device)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)

    def steps(count: int) -> None:
        for _ in range(count):
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
        torch.cuda.synchronize()

    steps(3)
    began = time.perf_counter()
    steps(10)
    return 1e3 * (time.perf_counter() - began) / 10


# All checks


def without(*names: str) -> dict[str, str]:
    """Return the variables that the package sets, without those whose names begin like this."""
    return {name: value for name, value in _VARIABLES.items() if not name.startswith(names)}


DUMPS = (
    "TORCH_NCCL_DUMP",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP",
    "TORCH_NCCL_ENABLE_MONITORING",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS",
)
SOON = {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "8"}
NONBLOCKING = {"TORCH_NCCL_USE_COMM_NONBLOCKING": "1", "TORCH_NCCL_NONBLOCKING_TIMEOUT": "120"}


@dataclass(frozen=True)
class Check:
    """A question, and the processes that ask it.

    Attributes:
        name: Its name on the command line.
        function: What each rank does. If it is needed, it returns whether the text is true.
        text: What the package needs to be true, or what is asked.
        needed: Whether the package needs it.
        ranks: Number of processes.
        answers: The first so many ranks answer; the others die, or wait until they are ended.
        limit_s: Seconds after which all of them are ended.
        variables: Environment variables.
        alone: Whether other checks would disturb it.
    """

    name: str
    function: Callable[[Rank], bool | None]
    text: str
    needed: bool = True
    ranks: int = 2
    answers: int = 1
    limit_s: float = 60.0
    variables: Mapping[str, str] | None = None
    alone: bool = False


ask = partial(Check, needed=False)

CHECKS = [
    ask("versions", versions, "Which versions are these?", ranks=1, alone=True),
    Check(
        "collectives_of_a_step",
        collectives_of_a_step,
        "All collectives of a step give what they should, in place and with gaps.",
        answers=2,
    ),
    Check(
        "broadcast_of_a_transposed_tensor",
        broadcast_of_a_transposed_tensor,
        "A tensor that is not contiguous is refused, or arrives as it was sent.",
        answers=2,
    ),
    Check("abort_of_one_collective", abort_of_one_collective, "An abort ends a collective that hangs."),
    Check("aborts_at_once", aborts_at_once, "Aborts at once end two collectives of which one is behind the other."),
    Check(
        "aborts_at_once_before_500_kernels",
        partial(aborts_at_once, behind=500),
        "They do so with 500 kernels behind them.",
    ),
    Check(
        "aborts_at_once_before_5000_kernels",
        partial(aborts_at_once, behind=5000),
        "They do so when the queue is full.",
    ),
    ask("aborts_in_turn", aborts_in_turn, "Does one abort after the other end?"),
    Check(
        "peer_dies",
        peer_dies,
        "After a peer's death, torch's watchdog lets the process abort, shut down and go on, within seconds.",
        limit_s=150,
    ),
    ask(
        "peer_dies_with_dumps",
        peer_dies,
        "How long does a shutdown take if torch may dump what it knows?",
        limit_s=150,
        variables=without(*DUMPS),
    ),
    ask(
        "peer_dies_with_defaults_of_torch",
        peer_dies,
        "Does torch's watchdog end the process if no variable is set?",
        limit_s=150,
        variables={},
    ),
    Check(
        "old_exception_dump",
        old_exception_dump,
        "A process lives though an earlier one has left its exception dump in the store.",
        ranks=1,
        limit_s=80,
        variables={**_VARIABLES, **SOON},
    ),
    ask(
        "old_exception_dump_with_dumps",
        old_exception_dump,
        "Does a process die of it if torch may dump?",
        ranks=1,
        limit_s=80,
        variables={**without(*DUMPS), **SOON, "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"},
    ),
    Check(
        "peer_dies_while_connecting",
        peer_dies_while_connecting,
        "A communicator that connects to a dead peer is aborted, and another one works afterwards.",
        limit_s=80,
    ),
    ask(
        "peer_died_before_a_first_collective",
        peer_died_before_a_first_collective,
        "If the first collective connects to a dead peer, does an abort release it?",
    ),
    *[
        Check(
            f"first_{kind}_after_connecting",
            partial(first_collective_after_connecting, kind=kind),
            f"An abort ends a communicator's first {kind}, whose peer has died since the two were connected.",
        )
        for kind in ("all_gather", "all_reduce", "broadcast")
    ],
    ask(
        "first_all_to_all_without_an_exchange",
        first_collective_without_an_exchange,
        "Does an abort end the first all_to_all, if nothing was exchanged before the peer died?",
        variables=without("NCCL_RUNTIME_CONNECT"),
    ),
    ask(
        "nonblocking_communicators",
        nonblocking_communicators,
        "Does a non-blocking communicator become initialized, and can its first collective be aborted?",
        limit_s=45,
        variables={**_VARIABLES, **NONBLOCKING},
    ),
    ask("wait_with_a_timeout", wait_with_a_timeout, "Can a collective be waited for in slices of time?"),
    Check(
        "kernel_that_hangs",
        kernel_that_hangs,
        "While a thread waits for a kernel that hangs, others go on, and can ask for an event.",
        ranks=1,
    ),
    Check("full_queue", full_queue, "A full queue blocks the thread that launches, and no other.", limit_s=70),
    Check(
        "full_queue_of_compiled_code",
        partial(full_queue, compiled=True),
        "So does that of compiled code, with the launcher that the package chooses.",
        limit_s=100,
    ),
    ask(
        "full_queue_of_static_launcher",
        partial(full_queue, compiled=True),
        "Does it with inductor's static launcher?",
        limit_s=50,
        variables={**_VARIABLES, "TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER": "1"},
    ),
    ask(
        "new_kernel_while_a_collective_hangs",
        new_kernel_while_a_collective_hangs,
        "Does the first launch of a kernel return while a collective hangs?",
    ),
    Check(
        "device_side_assertion",
        device_side_assertion,
        "With a sticky error and a collective that hangs, an abort ends, and the package knows that the device is lost.",
    ),
    Check(
        "ten_generations",
        ten_generations,
        "Ten times three groups, opened and aborted, leave less than 200 MiB behind.",
        answers=2,
        limit_s=120,
        alone=True,
    ),
    Check(
        "memory_of_a_killed_process",
        memory_of_a_killed_process,
        "Memory of a killed process is free within 10 s.",
        ranks=1,
        limit_s=80,
        alone=True,
    ),
    ask(
        "cost_of_a_step",
        cost_of_a_step,
        "What does a step cost the host, and how often does it wait for the GPU?",
        ranks=1,
        limit_s=200,
        alone=True,
    ),
]
BY_NAME = {check.name: check for check in CHECKS}


# The parent


@dataclass(frozen=True)
class Trial:
    """How the processes of a check have ended.

    Attributes:
        logs: What each rank has written.
        codes: Exit code of each rank that answers; None if it was still running.
        seconds: How long that took.
        was_cut: Whether there was less time than the check's limit.
    """

    logs: Sequence[str]
    codes: Sequence[int | None]
    seconds: float
    was_cut: bool

    def answers(self) -> list[dict[str, Any]]:
        """Return all that each rank which answers has found."""
        return [answer_in(log) for log in self.logs[: len(self.codes)]]


def answer_in(log: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for line in log.splitlines():
        if line.startswith(MARK):
            found.update(json.loads(line[len(MARK) :]))
    return found


def run_check(check: Check, gpus: int, deadline: float) -> Trial:
    began = time.monotonic()
    end = min(deadline, began + check.limit_s)
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)  # outlives the ranks, as a supervisor's does
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / str(rank) for rank in range(check.ranks)]
        processes = [start(check, rank, store.port, gpus, log) for rank, log in enumerate(logs)]
        try:
            codes = codes_at(end, processes[: check.answers])
        finally:
            kill(processes)
        texts = [log.read_text(errors="replace") for log in logs]
    return Trial(texts, codes, time.monotonic() - began, None in codes and end == deadline)


def start(check: Check, rank: int, port: int, gpus: int, log: Path) -> "subprocess.Popen[bytes]":
    inherited = {name: value for name, value in os.environ.items() if name not in _VARIABLES}
    shared = {**ON_ONE_GPU, "NCCL_HOSTID": f"rank{rank}"} if gpus == 1 else {}
    own = _VARIABLES if check.variables is None else check.variables
    environment = {**inherited, "NCCL_DEBUG": "WARN", **shared, **own}
    command = [sys.executable, __file__, "--child", check.name, "--rank", str(rank), "--port", str(port)]
    with log.open("wb") as output:
        return subprocess.Popen(
            [*command, "--gpus", str(gpus)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def codes_at(end: float, processes: "Sequence[subprocess.Popen[bytes]]") -> list[int | None]:
    """Wait until the processes have ended, or until ``end``."""
    while time.monotonic() < end and any(process.poll() is None for process in processes):
        time.sleep(0.05)
    return [process.poll() for process in processes]


def kill(processes: "Sequence[subprocess.Popen[bytes]]") -> None:
    for process in processes:
        process.kill()
    for process in processes:
        with suppress(subprocess.TimeoutExpired):  # the driver may still hold it
            process.wait(10)


def run_child(args: argparse.Namespace) -> NoReturn:
    check = BY_NAME[args.child]
    signal.alarm(int(check.limit_s) + 10)  # if nobody is left to end this process, nor a thread that has the GIL
    code = 0
    try:
        holds = check.function(Rank(args.rank, check.ranks, args.port, args.gpus))
        if holds is not None:
            note(holds=holds)
    except Exception:
        traceback.print_exc()
        code = 1
    os._exit(code)  # exit handlers may wait for what hangs


@dataclass(frozen=True)
class Outcome:
    """A line of the report, and what belongs to it further below."""

    check: Check
    verdict: str
    found: str = ""
    seconds: float = 0.0
    output: str = ""


def judge(check: Check, trial: Trial) -> Outcome:
    if trial.was_cut:
        return Outcome(check, "not reached", findings(trial), trial.seconds)
    ended_well = not any(trial.codes) and None not in trial.codes
    if not check.needed:
        verdict = "INFO"
    elif ended_well and all(answer.get("holds") for answer in trial.answers()):
        verdict = "PASS"
    else:
        verdict = "FAIL"
    show = verdict == "FAIL" or not ended_well
    return Outcome(check, verdict, findings(trial), trial.seconds, last_lines(trial.logs) if show else "")


def findings(trial: Trial) -> str:
    """Return all that the ranks have found, and how they have ended if they did not return."""
    texts = [
        "; ".join([*figures(answer), *how_it_ended(code, trial.seconds)])
        for answer, code in zip(trial.answers(), trial.codes, strict=True)
    ]
    return texts[0] if len(texts) == 1 else "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))


def figures(answer: Mapping[str, Any]) -> list[str]:
    return [f"{name.replace('_', ' ')}: {value}" for name, value in answer.items() if (name, value) != ("holds", True)]


def how_it_ended(code: int | None, seconds: float) -> list[str]:
    if code == 0:
        return []
    if code is None:
        return [f"**still running after {seconds:.0f} s**"]
    return [f"**ended by {signal.Signals(-code).name}**" if code < 0 else f"**ended with exit code {code}**"]


def last_lines(logs: Sequence[str]) -> str:
    lines = []
    for rank, log in enumerate(logs):
        said = [line for line in log.splitlines() if line.strip() and not line.startswith((MARK, "frame #"))]
        lines += [f"rank {rank}: {line[:200]}" for line in said[-TAIL:]]
    return "\n".join(lines)


class Report:
    """The report, which is written anew after each check."""

    def __init__(self, path: Path, gpus: int) -> None:
        self._path, self._gpus = path, gpus
        self._lock = threading.Lock()
        self._outcomes: list[Outcome] = []
        self._tests: list[str] = []

    def add(self, outcome: Outcome) -> None:
        with self._lock:
            self._outcomes.append(outcome)
            self._write()
        print(f"{outcome.verdict} {outcome.check.name} ({outcome.seconds:.1f} s): {outcome.found}", flush=True)

    def add_tests(self, lines: Sequence[str]) -> None:
        """Add what pytest has said, the closing line last."""
        with self._lock:
            self._tests = list(lines)
            self._write()
        print(lines[-1], flush=True)

    @property
    def all_passed(self) -> bool:
        """Whether nothing has failed, and all was reached."""
        return all(outcome.verdict in ("PASS", "INFO") for outcome in self._outcomes)

    def _write(self) -> None:
        where = "two ranks share a GPU" if self._gpus == 1 else f"{self._gpus} GPUs"
        lines = ["# What NCCL and CUDA do", "", f"{date.today().isoformat()}; {machine()}; {where}.", ""]
        lines += ["PASS, FAIL: the package needs it. INFO: what was found.", ""]
        lines += ["| verdict | check | what is needed, or asked | found | s |", "|---|---|---|---|---|"]
        lines += [row(outcome) for outcome in sorted(self._outcomes, key=lambda outcome: CHECKS.index(outcome.check))]
        if self._tests:
            lines += ["", f"## {', '.join(TESTS)}", "", "```", *self._tests, "```"]
        for outcome in self._outcomes:
            if outcome.output:
                lines += ["", f"## Last lines of {outcome.check.name}", "", "```", outcome.output, "```"]
        self._path.write_text("\n".join(lines) + "\n")


def row(outcome: Outcome) -> str:
    check = outcome.check
    cells = [
        outcome.verdict,
        f"`{check.name}`",
        check.text,
        one_line(outcome.found),
        f"{outcome.seconds:.1f}",
    ]
    return "| " + " | ".join(cells) + " |"


def one_line(text: str) -> str:
    return " ".join(text.replace("|", "\\|").splitlines())


def run_checks(checks: Sequence[Check], gpus: int, lanes: int, deadline: float, report: Report) -> None:
    """Run most checks several at a time, the longest first; those that must be alone come before and after them."""

    def run(check: Check) -> None:
        if time.monotonic() < deadline:
            report.add(judge(check, run_check(check, gpus, deadline)))
        else:
            report.add(Outcome(check, "not reached"))

    alone = [check for check in checks if check.alone]
    together = sorted((check for check in checks if not check.alone), key=lambda check: -check.limit_s)
    for check in alone[:1]:
        run(check)
    with ThreadPoolExecutor(lanes) as pool:
        list(pool.map(run, together))
    for check in alone[1:]:
        run(check)


def run_tests(deadline: float, report: Report, log: Path) -> bool:
    """Run the tests of the package that need a GPU; return whether all have passed. If not, write what they said."""
    limit_s = deadline - time.monotonic()
    if limit_s <= 0:
        report.add_tests(["not reached"])
        return False
    options = ["-p", "no:cacheprovider", "-p", "no:benchmark", "-n", "5", "--dist", "worksteal"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *TESTS],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "TESTS_ACCELERATOR": "one gpu, nccl"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGKILL)  # with its workers
            process.wait()
        output.seek(0)
        lines = [line.rstrip() for line in output if line.strip()]
    if code != 0:
        log.write_text("\n".join(lines) + "\n")
    report.add_tests(closing_lines(lines, code, limit_s))
    return code == 0


def closing_lines(lines: Sequence[str], code: int | None, limit_s: float) -> list[str]:
    """Return which tests have failed, and the last line."""
    last = lines[-1] if lines else f"pytest: exit code {code}"
    failed = [line[:300] for line in lines[:-1] if line.startswith(("FAILED ", "ERROR "))]
    return [*failed, last if code is not None else f"not reached: pytest was ended after {limit_s:.0f} s at: {last}"]


def what_is_missing(gpus: int) -> str:
    """Return what the checks need and this machine lacks; an empty text if it has all."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not found:
        return "a GPU, and torch sees none"
    if found < gpus:
        return f"{gpus} GPUs, and torch sees {found}"
    return "" if dist.is_nccl_available() else "NCCL, and this torch comes without it"


def main() -> int:
    cores = os.cpu_count() or 1
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1, choices=[1, 2], help="GPUs for the two ranks")
    parser.add_argument("--minutes", type=float, default=9.0, help="time for all; the rest is reported as not reached")
    parser.add_argument("--lanes", type=int, default=max(1, min(4, cores // 4)), help="checks that run at once")
    parser.add_argument("--only", nargs="+", choices=BY_NAME, metavar="CHECK", help=f"of {', '.join(BY_NAME)}")
    parser.add_argument("--checks-only", action="store_true", help="leave out the tests")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(),
        help="folder for first_cuda.md, and for first_cuda_tests.log if a test has failed",
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        run_child(args)
    missing = what_is_missing(args.gpus)
    if missing:
        print(f"{Path(__file__).name} needs {missing}.", file=sys.stderr)
        return 2
    deadline = time.monotonic() + 60 * args.minutes
    args.out.mkdir(parents=True, exist_ok=True)
    report = Report(args.out / "first_cuda.md", args.gpus)
    checks = [check for check in CHECKS if args.only is None or check.name in args.only]
    run_checks(checks, args.gpus, args.lanes, deadline, report)
    tests_passed = args.checks_only or run_tests(deadline, report, args.out / "first_cuda_tests.log")
    return 0 if report.all_passed and tests_passed else 1


if __name__ == "__main__":
    sys.exit(main())
