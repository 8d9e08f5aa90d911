"""Whether torch_npu is what the package takes it for, by torch_npu's own sources.

torch_npu cannot be imported without an Ascend machine's libraries, so its wheel is only read: Python by `ast`, what is
written in C++ by the headers and strings that come with it. It is always the wheel for x86_64 and Python 3.11; what is
read is the same in all of them.
"""

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_replica
from lightning_replica.devices import npu_contract as contract
from lightning_replica.devices.npu_contract import Call, ErrorCode, Method
from tests.support.npu_wheel import HEADERS, NO_DEVICE, Wheel, at_hand, skeleton
from tests.support.ranks import run_ranks

PACKAGE = Path(lightning_replica.__file__).parent


def broken(wheel: Wheel, call: Call) -> str:
    """What is wrong with an assumption; empty if nothing is."""
    function = wheel.find(call.module, call.name)
    if not isinstance(function, ast.FunctionDef):
        return f"{call} is missing"
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    names = names[1:] if "." in call.name else names
    if tuple(names[: len(call.positional)]) != call.positional:
        return f"{call} takes {names}, not {call.positional} first"
    keywords = {argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)}
    if not set(call.keywords) <= keywords:
        return f"{call} takes {sorted(keywords)}, not {call.keywords} by name"
    needed = {*names[: len(names) - len(arguments.defaults)]}
    needed |= {arg.arg for arg, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if not default}
    if not needed <= {*call.positional, *call.keywords}:
        return f"{call} cannot be called without {sorted(needed)}"
    gives = any(isinstance(node, ast.Return) and node.value is not None for node in ast.walk(function))
    return f"{call} returns nothing, not {call.returns}" if call.returns and not gives else ""


@pytest.fixture(scope="module")
def wheel() -> Wheel:
    return at_hand()


def test_it_is_made_for_the_torch_at_hand(wheel: Wheel) -> None:
    """The doctor compares versions as torch_npu itself does: all but the last number must be the same."""
    required = Parser().parsestr(wheel.metadata).get_all("Requires-Dist", [])
    ours = torch.__version__.split("+")[0]
    assert f"torch=={ours}" in required or f"torch=={ours}.*" in required, required


@pytest.mark.parametrize("call", contract.CALLS, ids=str)
def test_calls(wheel: Wheel, call: Call) -> None:
    assert not broken(wheel, call)


@pytest.mark.parametrize("method", contract.METHODS, ids=str)
def test_methods_of_the_backend(wheel: Wheel, method: Method) -> None:
    assert wheel.holds(method.name)
    header = re.sub(r"\s+", " ", wheel.text(HEADERS + "distributed/ProcessGroupHCCL.hpp"))
    assert f" {method.declaration}" in header


@pytest.mark.parametrize("error", contract.ERROR_CODES, ids=lambda error: f"{error.code}-{error.text}")
def test_error_codes(wheel: Wheel, error: ErrorCode) -> None:
    header = wheel.text("torch_npu/include/third_party/acl/inc/acl/error_codes/rt_error_codes.h")
    assert re.search(rf"#define\s+{error.macro}\s+{error.code}\b", header)
    assert wheel.holds(error.text)


@pytest.mark.parametrize("text", [*contract.TEXTS, *contract.VARIABLES])
def test_texts_and_variables(wheel: Wheel, text: str) -> None:
    assert wheel.holds(text)


def test_a_message_ends_with_its_code(wheel: Wheel) -> None:
    header = re.sub(r"\s+", " ", wheel.text(HEADERS + "core/npu/NPUException.h"))
    assert '" NPU function error: "' in header
    assert '", error code is "' in header


def test_memory_has_four_answers(wheel: Wheel) -> None:
    """What `check_uce_in_memory` writes into its log when it gives an answer of its own."""
    for answer in range(4):
        assert wheel.holds(f"NPU check_uce_in_memory end, device is %d, mem_type is {answer}.")


def test_the_backends_class_is_where_doctor_looks_for_it(wheel: Wheel) -> None:
    source = wheel.text("torch_npu/_init/registry/distributed.py")
    assert f"return {contract.BACKEND_CLASS}(" in source


def test_it_registers_its_names(wheel: Wheel) -> None:
    calls = [node for tree in wheel.modules() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    made = {ast.unparse(node.func).rpartition(".")[2]: node for node in calls if _constant(node) == contract.BACKEND}
    (devices,) = [word.value for word in made["register_backend"].keywords if word.arg == "devices"]
    assert ast.literal_eval(devices) == [contract.DEVICE_TYPE]
    named = {ast.unparse(node.func) for node in calls if _constant(node) == contract.DEVICE_TYPE}
    assert "torch.utils.rename_privateuse1_backend" in named


def _constant(call: ast.Call) -> object:
    return call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (Call("torch_npu.npu", "start_device", ("device_id",)), "is missing"),
        (Call("torch_npu.npus", "stop_device", ("device_id",)), "is missing"),
        (Call("torch_npu.npu", "Event.recorded_times"), "is missing"),
        (Call("torch_npu.npu", "stop_device", ("device",)), "not ('device',) first"),
        (Call("torch_npu.npu", "set_rng_state", ("device", "new_state")), "first"),
        (Call("torch_npu.npu", "stop_device", ("device_id", "timeout")), "first"),
        (Call("torch_npu.npu", "restart_device", ("device_id",), ("timeout",)), "by name"),
        (Call("torch_npu.npu", "stop_device"), "cannot be called without ['device_id']"),
        (Call("torch_npu.npu", "restart_device", ("device_id",), returns="0"), "returns nothing, not 0"),
    ],
)
def test_what_is_assumed_wrongly_is_found(wheel: Wheel, call: Call, complaint: str) -> None:
    assert complaint in broken(wheel, call)


def uses() -> Iterator[tuple[str, ast.Call]]:
    """Every call of torch_npu's that the package makes, by whichever name it has there."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func).removeprefix("self.").removeprefix("_")
                if name.startswith("torch_npu."):
                    yield name, node


def test_nothing_else_is_called() -> None:
    """And what is called is called as the contract says, so that no argument goes unchecked."""
    calls = {str(call): call for call in contract.CALLS}
    found = list(uses())
    assert {name for name, _ in found} >= {"torch_npu.npu.set_device", "torch_npu.npu.mem_get_info"}
    for name, node in found:
        assert name in calls, f"{name} is not in npu_contract.CALLS"
        assert len(node.args) <= len(calls[name].positional), ast.unparse(node)
        known = {*calls[name].keywords, *calls[name].positional}
        assert {word.arg for word in node.keywords} <= known, ast.unparse(node)


def imported_differs(rank: int, store: Any, folder: str) -> list[str]:
    sys.path.insert(0, folder)
    importlib.import_module("torch_npu")
    return list(contract.differences())


def test_what_is_imported_is_held_against_the_contract(wheel: Wheel, tmp_path: Path) -> None:
    folder = skeleton(wheel, tmp_path, NO_DEVICE)
    assert run_ranks(1, imported_differs, str(folder)) == [[]]
    changes = {
        "npu": [("def stop_device(device_id)", "def stop_device(device)"), ("def empty_cache(", "def drop_cache(")],
        "npu/_recovery": [("def update_npu_tensor_to_safe(tensor_obj)", "def update_npu_tensor_to_safe()")],
        "distributed": [("rebuild_link", "link")],
        "_C/_distributed_c10d": [("def abort_hccl_comm", "def abort")],
    }
    for module, replaced in changes.items():
        path = folder / "torch_npu" / module / "__init__.py"
        text = path.read_text()
        for old, new in replaced:
            assert text.count(old) == 1, (module, old)
            text = text.replace(old, new)
        path.write_text(text)
    (differences,) = run_ranks(1, imported_differs, str(folder))
    assert sorted(differences) == [
        "torch_npu._C._distributed_c10d.ProcessGroupHCCL.abort_hccl_comm is missing",
        "torch_npu.distributed.reinit_process_group: got an unexpected keyword argument 'rebuild_link'",
        "torch_npu.npu._recovery.update_npu_tensor_to_safe: too many positional arguments",
        "torch_npu.npu.empty_cache is missing",
        "torch_npu.npu.stop_device takes (device), not device_id first",
    ]
