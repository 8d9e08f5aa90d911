"""The house rules that a review would forget: imports go down, files and functions stay small, names are pinned."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_replica

PACKAGE = Path(lightning_replica.__file__).parent
# From the ground up. A file may import from its own row and from those above it in this list.
LAYERS = [
    ["errors", "messages", "checks", "_compat"],
    ["points", "grid", "works", "digests", "exit_codes", "planned_save"],
    ["devices"],
    ["plain", "structure"],
    ["sharding"],
    ["recovery"],
    ["checkpoint"],
    ["launch"],
    ["attributes", "frozen", "loop_results", "succession", "written"],
    ["data"],
    [
        "agreement",
        "callback_state",
        "hooks",
        "checkpoint_files",
        "data_setup",
        "logger_rows",
        "logger_runs",
        "objects",
        "save_beside",
        "metrics",
        "module_buffers",
        "overrides",
        "own_states",
        "precision",
        "session",
        "which_checkpoint",
    ],
    ["lightning_collectives", "snapshot", "host", "incidents"],
    ["training"],
    ["resume", "checkpoints"],
    ["dying_gasp"],
    ["lightning_checkpoints"],
    ["accelerators", "callbacks", "chaos", "fit_loop", "strategy"],
    [""],
    ["cli", "conf"],
    ["__main__"],
]
NO_LIGHTNING = ["sharding", "recovery", "checkpoint", "devices", "grid", "points", "works", "errors", "digests"]


DEVICES = {"cpu", "cuda", "npu", "gloo", "nccl", "hccl"}
# The last trains a model on purpose where every machine can.
NAME_DEVICES = ["devices", "accelerators", "_compat", "cli.smoke"]


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def layer(module: str) -> int:
    top = module.split(".")[0]
    return next(number for number, names in enumerate(LAYERS) if top in names)


@pytest.mark.parametrize("path", files(), ids=module_of)
def test_imports_go_down(path: Path) -> None:
    own = module_of(path)
    for name in imports(path):
        if not name.startswith("lightning_replica."):
            continue
        target = name.removeprefix("lightning_replica.")
        if (PACKAGE / target.split(".")[0]).exists() or (PACKAGE / f"{target.split('.')[0]}.py").exists():
            assert layer(target) <= layer(own), f"{own} imports {target}, which stands above it"


@pytest.mark.parametrize("path", files(), ids=module_of)
def test_lower_layers_know_no_lightning(path: Path) -> None:
    own = module_of(path).split(".")[0]
    found = imports(path)
    if own in NO_LIGHTNING:
        assert not [name for name in found if name.split(".")[0] == "lightning"]
        assert not [name for name in found if name.startswith("lightning_replica._compat.lightning")]
    if own == "recovery":
        assert not [name for name in found if name.startswith("lightning_replica.sharding")]


@pytest.mark.parametrize("path", files(), ids=module_of)
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 450
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or 0) - node.body[0].lineno + 1
            assert length <= 60, f"{node.name} has {length} lines"


@pytest.mark.parametrize("path", files(), ids=module_of)
def test_private_names_of_others_are_in_compat(path: Path) -> None:
    if module_of(path).startswith("_compat"):
        return
    foreign = [name for name in imports(path) if name.split(".")[0] in ("lightning", "torch", "torchmetrics")]
    assert not [name for name in foreign if any(part.startswith("_") for part in name.split("."))]


def names_of_devices(text: str) -> list[str]:
    """Where a file says "cuda" or "cuda:0,cpu:gloo", ``torch.cuda``, ``.is_cuda``, or asks what a device's type is.

    ``tensor.cpu()`` says where the copy goes, not where the tensor was.
    """
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if " " not in node.value and DEVICES & {*re.split("[:,]", node.value.lower())}:
                found.append(f"{node.lineno}: {node.value!r}")
        elif isinstance(node, ast.Attribute):
            asked = ast.unparse(node).endswith("device.type")
            known = node.attr.lower().removeprefix("is_") in DEVICES - {"cpu"} or node.attr == "is_cpu"
            if known or asked:
                found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("path", files(), ids=module_of)
def test_only_devices_name_devices(path: Path) -> None:
    own = module_of(path)
    if not any(own == name or own.startswith(f"{name}.") for name in NAME_DEVICES):
        assert not names_of_devices(path.read_text())


@pytest.mark.parametrize(
    "line",
    [
        'map_location="cuda:0"',
        'open("cpu:gloo,npu:hccl")',
        "torch.cuda.synchronize()",
        "dist.Backend.GLOO",
        "x.is_cpu",
        'a.device.type != "meta"',
        "x = root_device.type",
    ],
)
def test_names_of_devices_are_found(line: str) -> None:
    assert len(names_of_devices(line)) == 1


@pytest.mark.parametrize("line", ["x.cpu()", '"CPU and gloo."', '"GLOO_SOCKET_IFNAME"', "x.device == HOST", "a.type"])
def test_what_only_looks_like_one_is_not(line: str) -> None:
    assert not names_of_devices(line)


def test_public_names() -> None:
    assert lightning_replica.__all__ == [
        "CheckpointPublisher",
        "ConfigurationError",
        "DyingGaspCheckpoint",
        "NPUAccelerator",
        "PeerRepair",
        "RankReplacement",
        "RecoveryCallback",
        "RecoveryError",
        "RecoveryReport",
        "ReplicaError",
        "ReplicaZeroStrategy",
        "StepRollback",
        "__version__",
        "register_fault",
    ]
    assert all(hasattr(lightning_replica, name) for name in lightning_replica.__all__)


def test_import_does_nothing_but_register() -> None:
    script = """
import logging, os, signal, sys, threading
import lightning.pytorch, torch
before = dict(os.environ), logging.root.handlers[:], signal.getsignal(signal.SIGTERM), threading.active_count()
random = torch.get_rng_state()
import lightning_replica
after = dict(os.environ), logging.root.handlers[:], signal.getsignal(signal.SIGTERM), threading.active_count()
assert before == after, (before, after)
assert torch.equal(random, torch.get_rng_state())
assert not [name for name in sys.modules if name.split(".")[0] in ("torch_npu", "megatron", "hydra")]
assert not [name for name in sys.modules if name.startswith(("lightning_replica.cli", "lightning_replica.conf"))]
from lightning.pytorch.strategies import StrategyRegistry
assert "replica_zero" in StrategyRegistry
lightning_replica.ReplicaZeroStrategy.register_strategies(StrategyRegistry)  # twice is no error
from lightning.pytorch.accelerators import AcceleratorRegistry
assert "npu" in AcceleratorRegistry
lightning_replica.NPUAccelerator.register_accelerators(AcceleratorRegistry)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True)
