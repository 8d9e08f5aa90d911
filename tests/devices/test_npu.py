"""The NPU behind the interface: what its errors mean, what is asked of torch_npu, in which order and from where.

Whole trainings on the simulated device are in tests/faults/test_npu.py.
"""

import ast
import inspect
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_replica.devices import npu, npu_contract
from lightning_replica.devices.host import HOST, rng_state
from lightning_replica.devices.interface import Survived
from lightning_replica.devices.npu import Npu
from lightning_replica.errors import CollectiveError
from tests.support import simulated_npu
from tests.support.ranks import run_ranks
from tests.support.simulated_hccl import half_of
from tests.support.simulated_npu import ERROR, TEXTS, Memory, Module, SimulatedAccelerator, SimulatedNpu

LEVELS = {
    "stop": "outside",
    "remote": "outside",
    "retry": "retry",
    "link": "retry",
    "ub link": "retry",
    "uce": "memory",
    "ecc": "memory",
    "suspect": "lost",
    "unknown uce": "lost",
    "heartbeat": "lost",
    "unsafe": "lost",
}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedNpu]:
    monkeypatch.setattr(simulated_npu, "MEMORY", Memory())
    monkeypatch.setattr(simulated_npu, "MODULE", Module())
    with simulated_npu.MEMORY:
        yield SimulatedNpu()


def stop(device: SimulatedNpu) -> None:
    """As the monitor does."""
    thread = threading.Thread(target=device.stop)
    thread.start()
    thread.join()


def place(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        simulated_npu.MEMORY.place(tensor)


# What errors mean


@pytest.mark.parametrize("name", LEVELS)
def test_levels(device: SimulatedNpu, name: str) -> None:
    fault = device.classify(RuntimeError(TEXTS[name]))
    assert fault is not None
    assert fault.level == LEVELS[name]
    assert fault.text in TEXTS[name]
    assert "operator()" not in fault.text


@pytest.mark.parametrize("error", npu_contract.ERROR_CODES, ids=lambda error: f"{error.code}-{error.text}")
def test_the_text_alone_says_the_same(device: SimulatedNpu, error: npu_contract.ErrorCode) -> None:
    with_code = device.classify(RuntimeError(ERROR.format(error.text, error.code)))
    alone = device.classify(ValueError(error.text))
    assert with_code is not None
    assert alone is not None
    assert (with_code.level, with_code.code) == (alone.level, alone.code)


def test_the_number_counts_more_than_a_text_in_the_users_message(device: SimulatedNpu) -> None:
    assert device.classify(RuntimeError(ERROR.format("aclnnMm", 161002))) is None  # a wrong argument
    assert device.classify(RuntimeError("shapes (3,4) and (5,6) not aligned")) is None
    assert device.classify(RuntimeError("Caught RuntimeError in DataLoader worker process 0.\n" + TEXTS["uce"])) is None


def test_others_errors(device: SimulatedNpu) -> None:
    failed = CollectiveError("a collective failed")
    assert device.classify(failed) is None
    failed.__cause__ = RuntimeError(TEXTS["heartbeat"])
    faults = [
        device.classify(each)
        for each in (failed, torch.OutOfMemoryError(TEXTS["oom"]), dist.DistBackendError("HCCL"), RuntimeError("gloo"))
    ]
    assert [None if fault is None else fault.level for fault in faults] == ["lost", "exhausted", "outside", "outside"]


# What is left


@pytest.mark.parametrize(
    ("answer", "expected"),
    [(0, Survived("all")), (1, Survived("nothing")), (2, Survived("redo")), (3, Survived("rebuild", ("main",)))],
)
def test_what_a_memory_error_leaves(device: SimulatedNpu, answer: int, expected: Survived) -> None:
    held = {"main": torch.ones(3), "params": torch.ones(3)}
    place(*held.values())
    simulated_npu.MODULE.answer = answer
    if answer == 3:
        simulated_npu.MEMORY.hit(held["main"])
    stop(device)
    assert device.clean(held) == expected
    device.restart()
    assert held["main"].add(1).numel() == 3  # can be used again


def test_it_may_be_asked_again(device: SimulatedNpu) -> None:
    """A fault in the middle of a recovery: it begins again, with a device that has not run since."""
    held = {"main": torch.ones(3), "params": torch.ones(3)}
    place(*held.values())
    simulated_npu.MODULE.answer = 3
    for name in held:
        simulated_npu.MEMORY.hit(held[name])
        stop(device)
        found = device.clean(held)
    assert found == Survived("rebuild", ("main", "params"))
    device.restart()
    stop(device)
    assert device.clean(held) == Survived("all")


class Cyclic:
    """What a traceback and the frames in it are."""

    def __init__(self) -> None:
        self.itself = self


def test_memory_that_only_a_traceback_holds_is_temporary(device: SimulatedNpu, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Cyclic()
    alive = weakref.ref(kept)
    monkeypatch.setattr(simulated_npu.MODULE, "check_uce_in_memory", lambda _: 2 if alive() is None else 3)
    stop(device)
    del kept
    assert device.clean({}) == Survived("redo")


def test_memory_of_what_nobody_can_give_again(device: SimulatedNpu) -> None:
    held, other = {"main": torch.ones(3)}, torch.ones(3)
    place(held["main"], other)
    simulated_npu.MODULE.answer = 3
    simulated_npu.MEMORY.hit(other)
    stop(device)
    assert device.clean(held) == Survived("nothing")


@pytest.mark.parametrize(("time", "expected"), [("now", "nothing"), ("old", "spoiled"), ("undated", "spoiled")])
def test_an_error_in_a_checksum_depends_on_its_time(device: SimulatedNpu, time: str, expected: str) -> None:
    with device.fence:
        pass
    simulated_npu.MODULE.answer = 3
    text = TEXTS["ecc"].format(simulated_npu.ECC_TIMES[time]())
    fault = device.classify(RuntimeError(text))
    assert fault is not None
    assert fault.code == 507054
    stop(device)
    assert device.clean({"main": torch.ones(3)}).level == expected


# The fence


def test_a_device_is_not_stopped_inside_the_fence(device: SimulatedNpu) -> None:
    weights = torch.ones(3)
    place(weights)
    thread = threading.Thread(target=device.stop)
    with device.fence:
        weights.add_(1)
        thread.start()
        thread.join(timeout=0.2)
        assert thread.is_alive()
        weights.add_(1)
    thread.join()
    assert weights.tolist() == [3.0, 3.0, 3.0]
    with pytest.raises(RuntimeError, match="FORCE STOP"):
        weights.add_(1)
    with pytest.raises(RuntimeError, match="FORCE STOP"), device.fence:
        raise AssertionError("inside")


def test_without_it_the_same_ends_in_garbage(device: SimulatedNpu) -> None:
    weights = torch.ones(3)
    place(weights)
    weights.add_(1)
    stop(device)
    assert weights.tolist() != [2.0, 2.0, 2.0]


def test_whoever_does_not_leave_the_fence_is_stopped_all_the_same(
    device: SimulatedNpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(npu, "_PATIENCE_S", 0.01)
    with pytest.raises(RuntimeError, match="FORCE STOP"), device.fence:
        stop(device)
    assert "the device is stopped anyway" in caplog.text
    device.restart()
    with device.fence:  # nobody holds it
        pass


def test_a_fence_that_is_stopped_while_it_is_entered(device: SimulatedNpu) -> None:
    """After the device has done all that came before, and before it is held."""
    synchronize = simulated_npu.MODULE.synchronize

    def synchronize_and_stop(index: int) -> None:
        synchronize(index)
        stop(device)

    simulated_npu.MODULE.synchronize = synchronize_and_stop  # type: ignore[method-assign, assignment]
    with pytest.raises(RuntimeError, match="FORCE STOP"), device.fence:
        raise AssertionError("inside")
    simulated_npu.MODULE.synchronize = synchronize  # type: ignore[method-assign]
    device.restart()
    with device.fence:
        pass


# torch_npu


class Moody(Module):
    """Its stop goes wrong, in the ways in which that goes wrong and the device is stopped nevertheless."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self.error = error

    def stop_device(self, device_id: int) -> int:
        super().stop_device(device_id)
        if self.error is not None:
            raise self.error
        return 1


@pytest.mark.parametrize("error", [None, RuntimeError("dictionary changed size during iteration")])
def test_a_stop_that_complains(
    error: Exception | None, device: SimulatedNpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(simulated_npu, "MODULE", Moody(error))
    moody = SimulatedNpu()
    stop(moody)
    assert moody.fence.stopped
    assert ("dictionary changed size" if error else "reports that this failed") in caplog.text


def test_a_device_that_was_not_stopped_is_not_restarted(device: SimulatedNpu) -> None:
    device.restart()  # would break a rule
    stop(device)
    device.restart()
    device.restart()


# Connections


def connections(rank: int, store: Any) -> list[Any]:
    device = SimulatedAccelerator().recovery_device(HOST)
    dist.init_process_group(device.backend, store=dist.PrefixStore("test", store), rank=0, world_size=1)
    used, unused, _ = groups = [dist.group.WORLD, dist.new_group([0]), dist.new_group([0])]
    halves = [half_of(group) for group in groups]
    halves[0].work()
    halves[2].work()
    halves[1]._tried.append("0")  # it has begun to connect
    name = halves[0].get_hccl_comm_name(0, init_comm=False)
    stop(device)
    device.abort_groups(groups)
    links = device.clean({}).links
    resumed = device.resume_groups([used, unused])
    left = [half.get_hccl_comm_name(0, init_comm=False) for half in halves]
    device.restart()
    halves[0].work()
    device.abort_groups([used])  # of a device that runs
    left.append(halves[0].get_hccl_comm_name(0, init_comm=False))
    return [links, resumed, [each == name for each in left], [half._tried for half in halves]]


def test_connections_go_on_or_begin_anew() -> None:
    """The one that is used keeps its connection; what had begun is forgotten; the user's own is given up."""
    (said,) = run_ranks(1, connections)
    assert said == [[True, False, True], True, [True, False, False, False], [[], [], []]]


def test_random_numbers(device: SimulatedNpu) -> None:
    own = simulated_npu.MODULE.random
    torch.rand(1, generator=own)
    state = device.rng_state()
    expected = torch.rand(2, generator=own).tolist(), torch.rand(2).tolist()
    device.set_rng_state(state)
    assert (torch.rand(2, generator=own).tolist(), torch.rand(2).tolist()) == expected
    device.set_rng_state(rng_state())  # of a run without devices


def test_what_the_device_is_called() -> None:
    assert (Npu.kind, Npu.backend, Npu.is_host) == ("npu", "cpu:gloo,npu:hccl", False)


def test_torch_npu_is_imported_when_it_is_used() -> None:
    with suppress(ModuleNotFoundError):
        Npu(0)
        raise AssertionError("torch_npu is not installed where tests run")


def used_names() -> set[str]:
    """Every name of torch_npu's in `devices.npu`, as `npu_contract` spells it, and methods of what those return."""
    tree = ast.parse(Path(npu.__file__).read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner, _, name = ast.unparse(node).rpartition(".")
            if owner in ("self._npu", "npu", "ctx.npu"):
                found.add(f"torch_npu.npu.{name}")
            elif owner.startswith("self._torch_npu."):
                found.add(f"torch_npu.{owner.removeprefix('self._torch_npu.')}.{name}")
            elif owner == "marks":
                found.add(f"torch_npu.npu._recovery.{name}")
            elif owner == "event":
                found.add(f"torch_npu.npu.Event.{name}")
            elif owner.startswith("self._hccl_of("):
                found.add(name)
    return found


def test_whatever_is_used_of_torch_npu_is_in_the_table() -> None:
    """Which tests/devices/test_torch_npu_contract.py holds against its sources."""
    known = {str(call) for call in npu_contract.CALLS} | {method.name for method in npu_contract.METHODS}
    modules = {"torch_npu.npu._recovery", "torch_npu.npu.Event"}  # whose functions and methods are
    used = used_names()
    assert {"torch_npu.npu.stop_device", "torch_npu.npu.Event.record"} <= used
    assert {"abort_hccl_comm", "get_hccl_comm_name", "torch_npu.distributed.reinit_process_group"} <= used
    assert "torch_npu.npu._recovery.update_npu_tensor_to_safe" in used
    assert used - known == modules


def test_the_simulation_takes_what_torch_npu_takes() -> None:
    owners: dict[str, Any] = {
        "torch_npu.npu": Module,
        "torch_npu.npu._recovery": simulated_npu.Recovery,
        "torch_npu.distributed": simulated_npu.Distributed,
    }
    compared = 0
    for call in npu_contract.CALLS:
        if str(call) in used_names():
            function = owners[call.module]
            for name in call.name.split("."):
                function = getattr(function, name)
            words = list(inspect.signature(function).parameters)[1:]
            assert tuple(words[: len(call.positional)]) == call.positional, call
            assert set(call.keywords) <= {*words}, call
            compared += 1
    assert compared >= 12
