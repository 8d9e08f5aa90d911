"""torch_npu's wheel, read as it is; and packages made of it that can be imported where there is no Ascend machine."""

import ast
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from lightning_replica.devices import npu_contract as contract

# Downloaded once (44 MB, seconds); pip asks the index each time whether there is a newer one for the same torch.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_replica" / "torch_npu"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
# How pip says that nobody has answered it.
UNREACHABLE = re.compile("connection broken|Max retries exceeded|name resolution|Could not fetch URL|timed out", re.I)
HEADERS = "torch_npu/include/torch_npu/csrc/"
LIBRARY = "torch_npu/lib/libtorch_npu.so"


def at_hand() -> "Wheel":
    """The one for the torch that is here."""
    wheel = Wheel(fetch(torch.__version__.split("+")[0]))
    (wanted,) = (each for each in map(Requirement, wheel.requires) if each.name == "torch")
    if not wanted.specifier.contains(torch.__version__, prereleases=True):
        pytest.skip(f"{wheel.path.name} is made for {wanted}, and torch is {torch.__version__}")
    return wheel


def fetch(wanted: str) -> Path:
    """The newest wheel for torch ``wanted`` ("2.13.0"); one that is here already where the index cannot be reached."""
    CACHE.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", f"torch_npu=={wanted}.*", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version=3.11", *(f"--platform={name}" for name in PLATFORMS), f"--dest={CACHE}"]
    command += ["--retries=1", "--timeout=15", "--progress-bar=off", "--disable-pip-version-check"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    said = answer.stdout + answer.stderr
    if answer.returncode == 0:
        return CACHE / re.findall(r"torch_npu-[\w.]+-[\w.-]+\.whl", said)[-1]
    here = list(CACHE.glob(f"torch_npu-{wanted}*.whl"))
    if here:
        return max(here, key=lambda path: path.stat().st_mtime)
    if UNREACHABLE.search(said):
        pytest.skip(f"the package index cannot be reached, and {CACHE} has no torch_npu {wanted}")
    assert "No matching distribution found" in said, said
    pytest.skip(f"there is no torch_npu for torch {wanted} (yet)")


class Wheel:
    """A wheel that is read, not installed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._zip = zipfile.ZipFile(path)
        self._names = set(self._zip.namelist())
        self._trees: dict[str, ast.Module] = {}

    def unpack(self, folder: Path) -> Path:
        """As pip would install it."""
        self._zip.extractall(folder)
        return folder

    def text(self, name: str) -> str:
        return self._zip.read(name).decode()

    @cached_property
    def metadata(self) -> str:
        return self.text(next(name for name in self._names if name.endswith(".dist-info/METADATA")))

    @property
    def requires(self) -> list[str]:
        """Its requirements, without those of extras."""
        lines = re.findall(r"^Requires-Dist: (.*)$", self.metadata, re.M)
        return [line for line in lines if "extra ==" not in line]

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
            if not isinstance(node, ast.ImportFrom):
                continue
            for alias in node.names:
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


# Where no NPU is, the answers of a torch_npu that can be imported nevertheless.
NO_DEVICE = {"torch_npu.npu.is_available": "False", "torch_npu.npu.device_count": "0"}
TWO_DEVICES = {
    "torch_npu.npu.is_available": "True",
    "torch_npu.npu.device_count": "2",
    "torch_npu.npu.set_device": "None",
    "torch_npu.npu.empty_cache": "None",
    "torch_npu.npu.get_device_name": "'Ascend910B'",
    "torch_npu.npu.memory_stats": "{'allocated_bytes.all.current': 7}",
    "torch_npu.npu.mem_get_info": "(3, 9)",
    "torch_npu.npu.utilization": "40",
    "torch_npu.npu.get_amp_supported_dtype": "[]",
    "torch_npu.npu.utils.get_cann_version": "{'CANN': '8.3.RC1', 'DRIVER': ''}[module]",
    "torch_npu.npu.utils.is_support_inf_nan": "False",
}


def skeleton(wheel: Wheel, folder: Path, answers: dict[str, str], torch_version: str = "") -> Path:
    """Writes a torch_npu with the wheel's own names, signatures and metadata, and without what needs a device.

    Args:
        wheel: Whose.
        folder: To be put on a path.
        answers: For each function that may be called, the expression that it returns.
        torch_version: Which torch it claims to be made for; by default that which the wheel is made for.
    """
    modules: dict[str, list[ast.stmt]] = {"torch_npu._C": [], "torch_npu.npu": []}
    for call in contract.CALLS:
        place = modules.setdefault(call.module, [])
        name, _, method = call.name.partition(".")
        if method:
            place.extend([] if any(_name(node) == name for node in place) else ast.parse(f"class {name}: ...").body)
            place = next(node.body for node in place if isinstance(node, ast.ClassDef) and node.name == name)
        place.append(_bare(wheel, call, answers.get(str(call))))
    methods = "\n".join(f"    def {method}(self): ..." for method in contract.METHODS)
    modules[contract.BACKEND_CLASS.module] = ast.parse(f"class {contract.BACKEND_CLASS.name}:\n{methods}").body
    for module, body in modules.items():
        path = folder.joinpath(*module.split("."), "__init__.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("import torch\n" + ast.unparse(ast.fix_missing_locations(ast.Module(body, []))))
    kind = contract.DEVICE_TYPE
    lines = ["import sys, torch", *(f"import {module}" for module in modules)]
    lines += [f"torch.utils.rename_privateuse1_backend({kind!r})"]
    lines += [f"torch._register_device_module({kind!r}, sys.modules['torch_npu.npu'])"]
    (folder / "torch_npu" / "__init__.py").write_text("\n".join(lines))
    _write_metadata(wheel, folder / "torch_npu-0.dist-info", torch_version)
    return folder


def _name(node: ast.stmt) -> str:
    return getattr(node, "name", "")


def _bare(wheel: Wheel, call: contract.Call, answer: str | None) -> ast.FunctionDef:
    """The function's own signature, and a body of ours."""
    node = wheel.find(call.module, call.name)
    assert isinstance(node, ast.FunctionDef), call
    for argument in (*node.args.args, *node.args.kwonlyargs):
        argument.annotation = None
    body = ast.parse("raise NotImplementedError").body
    if answer is not None:
        body = [ast.Return(ast.parse(answer, mode="eval").body)]
    return ast.FunctionDef(call.name.rpartition(".")[2], node.args, body, [], lineno=0)


def _write_metadata(wheel: Wheel, folder: Path, torch_version: str) -> None:
    text = wheel.metadata
    if torch_version:
        text = re.sub("(?m)^Version: .*", f"Version: {torch_version}", text)
        text = re.sub("(?m)^Requires-Dist: torch==.*", f"Requires-Dist: torch=={torch_version}", text)
    folder.mkdir()
    (folder / "METADATA").write_text(text)
