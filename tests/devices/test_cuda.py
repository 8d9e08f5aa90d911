"""What CUDA and NCCL say, and what follows from it; then, where there is a GPU, whether they do say it.

Messages are put together as torch does it: c10/cuda/CUDAException.cpp and CUDAMiscFunctions.cpp (the texts are those of
`cudaGetErrorString`), CUDACachingAllocator.cpp, torch/csrc/distributed/c10d/NCCLUtils.cpp. Whole ones from reports:
NVIDIA/nccl issue 2076 (remote error), pytorch/pytorch 113128 (ECC), huggingface/accelerate 1192 (ECC).
"""

import functools
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from lightning_replica._compat.torch import backend_of
from lightning_replica.core import pending_work
from lightning_replica.core.grid import Grid
from lightning_replica.core.polling import poll
from lightning_replica.devices import cuda as cuda_module
from lightning_replica.devices import device_for
from lightning_replica.devices.cuda import Cuda
from lightning_replica.devices.host import HOST, rng_state
from lightning_replica.errors import CollectiveError
from lightning_replica.exit_codes import DEVICE_LOST
from lightning_replica.groups.membership import make_groups
from lightning_replica.groups.world import ProcessGroups
from tests.support import world
from tests.support.job import Case, Fault
from tests.support.ranks import run_ranks
from tests.support.typed import world_group

cuda_variables, harmful_variables = cuda_module._VARIABLES, cuda_module._HARMFUL
SUFFIX = """
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""


def cuda(text: str, name: str = "") -> str:
    """As torch puts it together; before 2.9 without the name."""
    types = "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html"
    return f"CUDA error: {text}" + (f"\nSearch for `{name}' in {types} for more information." if name else "") + SUFFIX


def nccl(text: str, detail: str) -> str:
    where = "/pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268"
    return f"NCCL error in: {where}, {text}, NCCL version 2.21.5\n{detail}\nLast error:\n"


UNHANDLED = "unhandled cuda error (run with NCCL_DEBUG=INFO for details)"
OOM = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 17.46 GiB is"
    " free. Including non-PyTorch memory, this process has 61.62 GiB memory in use."
)
LOST = [
    cuda("device-side assert triggered", "cudaErrorAssert"),
    cuda("device-side assert triggered"),
    cuda("an illegal memory access was encountered", "cudaErrorIllegalAddress"),
    cuda("misaligned address"),
    cuda("unspecified launch failure"),
    cuda("uncorrectable ECC error encountered", "cudaErrorECCUncorrectable"),
    cuda("uncorrectable NVLink error detected during the execution"),
    cuda("unknown error"),
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, m, n, k, &alpha, a)`",
    "CUDA driver error: device not ready",
    "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.",
    nccl(UNHANDLED, "ncclUnhandledCudaError: Call to CUDA function failed.")
    + "Cuda failure 'unspecified launch failure'",
]
EXHAUSTED = [
    OOM,
    cuda("out of memory", "cudaErrorMemoryAllocation"),
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    nccl(UNHANDLED, "ncclUnhandledCudaError: Call to CUDA function failed.") + "Cuda failure 2 'out of memory'",
]
OUTSIDE = [
    nccl(
        "remote process exited or there was a network error",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    )
    + "socketProgressOpt: Call to recv from 172.16.0.1<33759> failed : Connection reset by peer",
    "NCCL communicator was aborted on rank 0. ",
]
OWN = [
    cuda("invalid configuration argument", "cudaErrorInvalidConfiguration"),
    cuda("no kernel image is available for execution on the device"),
    "CUDA error: invalid device ordinal\nGPU device may be out of range, do you have enough GPUs?" + SUFFIX,
    "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n  ...\n"
    + cuda("initialization error"),
    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate",
]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    for name in (*cuda_variables, *harmful_variables):
        monkeypatch.setenv(name, "")  # so that what comes of it is taken back
        monkeypatch.delenv(name)
    return Cuda(0)


@pytest.mark.parametrize("text", LOST)
def test_after_these_the_device_cannot_be_used(device: Cuda, text: str) -> None:
    fault = device.classify(dist.DistBackendError(text) if "NCCL" in text else RuntimeError(text))
    assert fault is not None
    assert (fault.level, fault.text) == ("lost", text.splitlines()[0])


@pytest.mark.parametrize("text", EXHAUSTED)
def test_these_are_a_matter_of_memory(device: Cuda, text: str) -> None:
    fault = device.classify(torch.OutOfMemoryError(text) if text is OOM else RuntimeError(text))
    assert fault is not None
    assert fault.level == "exhausted"


@pytest.mark.parametrize("text", OUTSIDE)
def test_these_come_from_other_ranks(device: Cuda, text: str) -> None:
    fault = device.classify(dist.DistBackendError(text))
    assert fault is not None
    assert fault.level == "outside"


@pytest.mark.parametrize("text", OWN)
def test_these_are_the_users_own(device: Cuda, text: str) -> None:
    assert device.classify(RuntimeError(text)) is None


def test_gloo_speaks_for_other_ranks_and_user_code_for_itself(device: Cuda) -> None:
    fault = device.classify(RuntimeError("Application timeout caused pair closure"))
    assert fault is not None
    assert fault.level == "outside"
    assert device.classify(KeyError("CUDA error: device-side assert triggered")) is None


def test_a_collective_that_failed_says_why(device: Cuda) -> None:
    """A kernel's error is met by whatever calls next, a collective too."""
    failed = CollectiveError("a collective failed")
    assert device.classify(failed) is None
    failed.__cause__ = RuntimeError(LOST[0])
    fault = device.classify(failed)
    assert fault is not None
    assert fault.level == "lost"


def test_a_number_is_kept(device: Cuda) -> None:
    error = torch.AcceleratorError(LOST[0])
    error.error_code = 710  # type: ignore[attr-defined]
    fault = device.classify(error)
    assert fault is not None
    assert fault.code == 710


def test_torch_is_told_to_leave_the_process_alone(device: Cuda, caplog: pytest.LogCaptureFixture) -> None:
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "0"
    assert not caplog.records
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "3"
    assert isinstance(device_for(torch.device("cuda", 1), None), Cuda)
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING=3 may end a rank" in caplog.text


@pytest.mark.parametrize(("name", "value"), harmful_variables.items())
def test_settings_that_break_recovery_are_named(
    device: Cuda, name: str, value: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(name, "something else")
    Cuda(0)
    assert not caplog.records
    monkeypatch.setenv(name, value)
    Cuda(0)
    assert f"{name}={value} may end a rank" in caplog.text


class Communicator:
    """NCCL's part of a group; its abort returns when the others' aborts have begun, too."""

    def __init__(self, begun: threading.Barrier | None, error: str = "") -> None:
        self.begun, self.error, self.aborted = begun, error, False

    def name(self) -> str:
        return "nccl"

    def abort(self) -> None:
        if self.begun is None:
            threading.Event().wait()
        else:
            self.begun.wait(20)
        if self.error:
            raise RuntimeError(self.error)
        self.aborted = True


def abort(device: Cuda, communicators: list[Communicator], monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[Any] = [SimpleNamespace(size=lambda: 0, own=own) for own in communicators]
    monkeypatch.setattr(cuda_module, "backend_of", lambda group, _: group.own)
    device.abort_groups(groups)


def test_all_communicators_are_aborted_at_once(
    device: Cuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One after the other never ends: each abort waits for kernels behind those of the next."""
    begun = threading.Barrier(3)
    communicators = [Communicator(begun), Communicator(begun, "unhandled cuda error"), Communicator(begun)]
    abort(device, communicators, monkeypatch)
    assert [own.aborted for own in communicators] == [True, False, True]
    assert "unhandled cuda error" in caplog.text


def test_an_abort_that_does_not_return_ends_the_process(device: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_module, "_ABORT_S", 0.1)
    ends: list[int] = []
    monkeypatch.setattr(os, "_exit", ends.append)
    abort(device, [Communicator(None)], monkeypatch)
    assert ends == [DEVICE_LOST]


def test_a_kernel_that_does_not_end_counts_as_a_lost_device(device: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_module, "_CLEAN_S", 0.1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: threading.Event().wait())
    assert device.clean({}).level == "nothing"


class Connects(Communicator):
    def __init__(self, error: str = "") -> None:
        super().__init__(threading.Barrier(1), error)
        self.may_connect = threading.Event()

    def eager_connect_single_device(self, device: torch.device) -> None:
        assert device == torch.device("cuda", 0)
        self.may_connect.wait(20)
        if self.error:
            raise RuntimeError(self.error)


@pytest.mark.parametrize("error", ["", "remote process exited"])
def test_a_rank_can_do_something_else_while_it_connects(
    error: str, device: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Connects(error)
    monkeypatch.setattr(cuda_module, "backend_of", lambda *_: own)
    monkeypatch.setattr(cuda_module, "_exchange", lambda *_: None)
    is_connected = device.connect(cast("Any", None))
    assert not is_connected()
    own.may_connect.set()
    if not error:
        poll(is_connected)
        return
    with pytest.raises(RuntimeError, match=error):
        poll(is_connected)


def test_a_group_of_gloo_alone_is_connected(device: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_module, "backend_of", lambda *_: SimpleNamespace(name=lambda: "gloo"))
    assert device.connect(cast("Any", None))()


def abort_without_nccl(rank: int, store: Any) -> Any:
    """A group that only the host's tensors use, as users make them."""
    dist.init_process_group("cpu:gloo", store=store, rank=rank, world_size=2)
    group, device = world_group(), torch.device("cuda", 0)
    carried = backend_of(group, HOST)
    work = dist.all_reduce(torch.ones(1), async_op=True) if rank == 0 else None
    dist.barrier(dist.new_group([0, 1], backend="gloo"))
    Cuda(0).abort_groups([group])
    failed = False
    if work is not None:
        try:
            work.wait(timedelta(seconds=20))
        except RuntimeError:
            failed = work.is_completed()
    return [carried is not None and carried.name(), backend_of(group, device) is None, failed]


def test_a_group_without_nccl_is_aborted_too() -> None:
    assert run_ranks(2, abort_without_nccl) == [["gloo", True, True], ["gloo", True, False]]


# With a GPU

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
nccl_too = pytest.mark.skipif(not dist.is_nccl_available(), reason="needs NCCL")


def draw_again(rank: int, store: Any) -> Any:
    device = Cuda(0)

    def draw() -> list[float]:
        return [*torch.rand(2, device="cuda").tolist(), *torch.rand(2).tolist()]

    draw()
    state = device.rng_state()
    expected = draw()
    torch.manual_seed(99)
    device.set_rng_state(state)
    again = draw()
    device.set_rng_state(rng_state())  # the host's alone, as in a checkpoint of a run on CPUs
    return [again == expected, device.rng_state() != state]


@gpu
def test_random_numbers_go_on_where_they_were() -> None:
    assert run_ranks(1, draw_again) == [[True, True]]


def break_the_context(rank: int, store: Any) -> Any:
    device, found = Cuda(0), []
    torch.zeros(3, device="cuda")[torch.tensor([7], device="cuda")]  # the host hears of it later
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            torch.cuda.synchronize()
        fault = device.classify(caught.value)
        found.append(None if fault is None else fault.level)
    return [*found, device.clean({}).level]


@gpu
def test_a_device_side_assertion_stays() -> None:
    assert run_ranks(1, break_the_context) == [["lost", "lost", "nothing"]]


def ask_for_too_much(rank: int, store: Any) -> Any:
    device = Cuda(0)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(2**46, dtype=torch.uint8, device="cuda")
    fault = device.classify(caught.value)
    survived = device.clean({})
    device.restart()
    return [None if fault is None else fault.level, survived.level, torch.ones(2, device="cuda").sum().item()]


@gpu
def test_after_too_little_memory_the_device_goes_on() -> None:
    assert run_ranks(1, ask_for_too_much) == [["exhausted", "all", 2.0]]


def open_abort_open(rank: int, store: Any) -> Any:
    """One rank over NCCL: a group is aborted, the next one works; the host's tensors go over gloo all the while."""
    own = ProcessGroups(store, rank, 1, Cuda(0), 60)
    sums = []
    for generation in range(3):
        own.open(generation, lambda timeout: make_groups(Grid.of(1, 1), rank, timeout, on_host=False).all())
        for where in ("cuda", HOST):
            value = torch.full((1000,), 1.0 + generation, device=where)
            work = dist.all_reduce(value, async_op=True)
            pending_work.wait(work if where == HOST else pending_work.Ordered(work), lambda: None)
            pending_work.finish(lambda: None)
            sums.append(value.sum().item())
        own.close()
    return sums


@gpu
@nccl_too
def test_groups_of_nccl_are_aborted_and_opened_again() -> None:
    assert run_ranks(1, open_abort_open) == [[1000.0, 1000.0, 2000.0, 2000.0, 3000.0, 3000.0]]


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], world.Outcome]:
    """Runs without a fault, one for each name of an accelerator."""

    @functools.cache
    def run(name: str) -> world.Outcome:
        outcome = world.run(Case(accelerator=name), tmp_path_factory.mktemp("untouched"))
        assert outcome.code == 0, outcome.logs
        return outcome

    return run


ON_ONE_GPU = pytest.mark.parametrize("name", ["one gpu", pytest.param("one gpu, nccl", marks=nccl_too)])


@gpu
@ON_ONE_GPU
@pytest.mark.parametrize("kind", ["kill", "exception"])
@pytest.mark.parametrize(
    "point", ["forward", "backward", "reduction", "before_commit", "after_commit", "update", "gather"]
)
def test_four_ranks_on_one_gpu_lose_one(
    point: str, kind: str, name: str, untouched: Callable[[str], world.Outcome], tmp_path: Path
) -> None:
    outcome = world.run(Case((Fault(kind, 1, point, 2),), accelerator=name), tmp_path)
    outcome.assert_same(untouched(name))
    assert "recovered at step" in outcome.logs


@gpu
@ON_ONE_GPU
@pytest.mark.parametrize("point", ["backward", "gather"])
def test_a_rank_that_hangs(point: str, name: str, untouched: Callable[[str], world.Outcome], tmp_path: Path) -> None:
    outcome = world.run(Case((Fault("sleep", 1, point, 2),), accelerator=name, hang=(8.0, 40.0)), tmp_path)
    outcome.assert_same(untouched(name))


@gpu
@ON_ONE_GPU
@pytest.mark.parametrize("point", ["forward", "reduction"])
@pytest.mark.parametrize("kind", ["kill", "exception"])
def test_a_rank_is_lost_in_the_first_step(
    kind: str, point: str, name: str, untouched: Callable[[str], world.Outcome], tmp_path: Path
) -> None:
    outcome = world.run(Case((Fault(kind, 1, point, 0),), accelerator=name), tmp_path)
    outcome.assert_same(untouched(name))


@gpu
@nccl_too
@pytest.mark.parametrize("opened", [5, 6])
def test_a_rank_dies_while_communicators_connect(
    opened: int,
    untouched: Callable[[str], world.Outcome],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the recovery from an exception, when it has connected some of its groups."""
    marker = tmp_path / "torn"
    marker.write_text(str(opened))
    monkeypatch.setenv("TORN_CONNECTION", str(marker))
    case = Case((Fault("exception", 1, "backward", 2),), accelerator="one gpu, torn connection")
    outcome = world.run(case, tmp_path)
    outcome.assert_same(untouched("one gpu, nccl"))
    assert marker.read_text() == "0"


@gpu
@ON_ONE_GPU
def test_one_is_killed_after_the_other(name: str, untouched: Callable[[str], world.Outcome], tmp_path: Path) -> None:
    faults = (Fault("kill", 1, "backward", 1), Fault("kill", 0, "gather", 2), Fault("exception", 3, "update", 4))
    outcome = world.run(Case(faults, accelerator=name), tmp_path)
    outcome.assert_same(untouched(name))


@gpu
@nccl_too
def test_one_rank_trains_over_nccl(tmp_path: Path) -> None:
    outcome = world.run(Case(replicas=1, devices=1, accelerator="cuda"), tmp_path)
    assert outcome.code == 0, outcome.logs
