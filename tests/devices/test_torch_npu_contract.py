"""Whether torch_npu is what the package takes it for, by torch_npu's own sources.

torch_npu cannot be imported without an Ascend machine's libraries, so its wheel is only read: Python by `ast`, what is
written in C++ by the headers and strings that come with it. It is always the wheel for x86_64 and Python 3.11; what is
read is the same in all of them.
"""

import ast
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from functools import cached_property
from pathlib import Path

import pytest
import torch

from lightning_replica.devices import npu_contract as contract
from lightning_replica.devices.npu_contract import Call, ErrorCode, Method

# Downloaded once (44 MB, seconds); pip asks the index each time whether there is a newer one of the same minor version.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_replica" / "torch_npu"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
# How pip says that nobody has answered it.
UNREACHABLE = re.compile("connection broken|Max retries exceeded|name resolution|Could not fetch URL|timed out", re.I)
HEADERS = "torch_npu/include/torch_npu/csrc/"
LIBRARY = "torch_npu/lib/libtorch_npu.so"


def fetch(minor: str) -> Path:
    """The newest wheel for torch ``minor`` ("2.13"); the one that is here already where the index cannot be reached."""
    CACHE.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", f"torch_npu=={minor}.*", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version=3.11", *(f"--platform={name}" for name in PLATFORMS), f"--dest={CACHE}"]
    command += ["--retries=1", "--timeout=15", "--progress-bar=off", "--disable-pip-version-check"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    said = answer.stdout + answer.stderr
    if answer.returncode == 0:
        return CACHE / re.findall(r"torch_npu-[\w.]+-[\w.-]+\.whl", said)[-1]
    assert UNREACHABLE.search(said), f"pip has no torch_npu for torch {minor}:\n{said}"
    here = list(CACHE.glob(f"torch_npu-{minor}.*.whl"))
    if not here:
        pytest.skip(f"the package index cannot be reached, and {CACHE} has no torch_npu {minor}")
    return max(here, key=lambda path: path.stat().st_mtime)


class Wheel:
    """A wheel that is read, not installed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._zip = zipfile.ZipFile(path)
        self._names = set(self._zip.namelist())
        self._trees: dict[str, ast.Module] = {}

    def text(self, name: str) -> str:
        return self._zip.read(name).decode()

    @cached_property
    def metadata(self) -> str:
        return self.text(next(name for name in self._names if name.endswith(".dist-info/METADATA")))

    @cached_property
    def library(self) -> bytes:
        return self._zip.read(LIBRARY)

    def holds(self, text: str) -> bool:
        """Whether the library has ``text`` as a whole string of its own."""
        return b"\0" + text.encode() + b"\0" in self.library

    def tree(self, module: str) -> tuple[ast.Module, str] | None:
        """A module's source, and the package that its relative imports count from."""
        path = module.replace(".", "/")
        for name, package in ((f"{path}/__init__.py", module), (f"{path}.py", module.rpartition(".")[0])):
            if name in self._names:
                if name not in self._trees:
                    self._trees[name] = ast.parse(self.text(name), name)
                return self._trees[name], package
        return None

    def modules(self) -> Iterator[ast.Module]:
        """Every module's source of the parts that are run when torch_npu is imported."""
        for name in sorted(self._names):
            if re.fullmatch(r"torch_npu/(__init__|_init/.*)\.py", name):
                yield ast.parse(self.text(name), name)

    def find(self, module: str, name: str) -> ast.FunctionDef | ast.ClassDef | None:
        """The definition behind ``module.name``, through any number of ``from ... import``."""
        found = self.tree(module)
        if found is None:
            return None
        tree, package = found
        head, _, rest = name.partition(".")
        for node in reversed(tree.body):  # the last one counts
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == head:
                return _inside(node, rest) if rest else node
            for alias in node.names if isinstance(node, ast.ImportFrom) else ():
                source = _absolute(node, package)
                if alias.name == "*" and head in self.public(source):
                    return self.find(source, name)
                if (alias.asname or alias.name) == head:
                    return self.find(source, ".".join(filter(None, (alias.name, rest))))
        return None

    def public(self, module: str) -> list[str]:
        """What ``from module import *`` gives."""
        found = self.tree(module)
        assignments = [node for node in found[0].body if isinstance(node, ast.Assign)] if found else []
        lists = [node.value for node in assignments if ast.unparse(node.targets[0]) == "__all__"]
        return list(ast.literal_eval(lists[-1])) if lists else []


def _inside(node: ast.FunctionDef | ast.ClassDef, name: str) -> ast.FunctionDef | None:
    return next((child for child in node.body if isinstance(child, ast.FunctionDef) and child.name == name), None)


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    base = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*base, *filter(None, [node.module])])


def broken(wheel: Wheel, call: Call) -> str:
    """What is wrong with an assumption; empty if nothing is."""
    function = wheel.find(call.module, call.name)
    if not isinstance(function, ast.FunctionDef):
        return f"{call} is not there"
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
    return Wheel(fetch(".".join(torch.__version__.split(".")[:2])))


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
        (Call("torch_npu.npu", "start_device", ("device_id",)), "is not there"),
        (Call("torch_npu.npus", "stop_device", ("device_id",)), "is not there"),
        (Call("torch_npu.npu", "Event.recorded_times"), "is not there"),
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
