"""The house rules that a review would forget: imports go down, names are pinned."""

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import lightning_replica
from lightning_replica._compat.packages import PACKAGES

PACKAGE = Path(lightning_replica.__file__).parent
# From the ground up: one folder a row. A file may import from its own row and from those above it in this list.
FOLDERS = [
    "_compat",
    "devices",
    "core",
    "stores",
    "control",
    "groups",
    "recovery",
    "report",
    "sharding",
    "checkpoint",
    "launch",
    "nodes",
    "state",
    "accelerators",
    "fabric",
    "trainer",
    "megatron",
    "chaos",
    "callbacks",
    "public",
    "",
    "cli",
    "conf",
    "__main__",
]
GROUND = {"errors", "exit_codes", "_version"}  # modules at the root that every folder may import
NO_LIGHTNING = ["devices", "core", "stores", "control", "groups", "recovery", "sharding", "checkpoint"]
# What may be touched of the engine from outside, and by whom.
ENGINE = "sharding.engine"


DEVICES = {"cpu", "cuda", "npu", "gloo", "nccl", "hccl"}
# The last trains a model on purpose where every machine can.
NAME_DEVICES = ["devices", "accelerators", "_compat", "cli.smoke"]


@cache
def files() -> tuple[Path, ...]:
    return tuple(sorted(PACKAGE.rglob("*.py")))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports(path: Path) -> tuple[str, ...]:
    names = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(names)


def floor(module: str) -> int:
    folder = module.split(".")[0]
    return -1 if folder in GROUND else FOLDERS.index(folder)


def own_imports(path: Path) -> list[str]:
    """What a file imports of the package, under TYPE_CHECKING and inside of functions too."""
    found = [name.removeprefix("lightning_replica.") for name in imports(path) if name.startswith("lightning_replica.")]
    return [name for name in found if (PACKAGE / name.split(".")[0]).exists() or f"{name.split('.')[0]}" in GROUND]


def test_imports_go_down() -> None:
    for path in files():
        own = module_of(path)
        for target in own_imports(path):
            assert floor(target) <= floor(own), f"{own} imports {target}, which stands above it"
        assert "lightning_replica" not in imports(path), f"{own} imports the whole package, with all that it imports"


def files_imported(path: Path, modules: set[str]) -> set[str]:
    """The files of the package that a file imports, under TYPE_CHECKING and inside of functions too."""
    found = set()
    for name in imports(path):
        if name.split(".")[0] == "lightning_replica":
            target = name.removeprefix("lightning_replica").removeprefix(".")
            while target not in modules:  # a name in a file, or of the package's own
                target = target.rpartition(".")[0]
            found.add(target)
    return found - {module_of(path)}


# Two wings, which meet in `recovery` and above: who is alive and who is replaced; whose bits go where.
PROCESSES, BITS = {"launch", "nodes"}, {"groups", "sharding", "checkpoint"}
BRIDGE = "launch.ending"  # counts the runs that have failed in the directory of their checkpoints


def test_processes_and_bits_know_nothing_of_each_other() -> None:
    crossings = set()
    for path in files():
        own = module_of(path)
        rooms = {target.split(".")[0] for target in own_imports(path)}
        above = {"recovery", "state", "trainer"}
        if own.split(".")[0] in PROCESSES and rooms & (BITS | above):
            crossings.add(own)
        if own.split(".")[0] in BITS and rooms & (PROCESSES | above):
            crossings.add(own)
    assert crossings == {BRIDGE}


def test_no_circle_of_files() -> None:
    modules = {module_of(path) for path in files()}
    assert "trainer.fit_loop" in files_imported(PACKAGE / "trainer" / "strategy.py", modules)
    TopologicalSorter({module_of(path): files_imported(path, modules) for path in files()}).prepare()


def test_lower_floors_know_no_lightning() -> None:
    for path in files():
        if room_of(path) in NO_LIGHTNING:
            found = [
                name for name in imports(path) if name.startswith(("lightning.", "lightning_replica._compat.lightning"))
            ]
            assert not found, f"{module_of(path)} imports {found}"


def test_lightning_is_imported_in_one_place() -> None:
    """Elsewhere, an import would bring in the package of Lightning that the script does not use."""
    roots = {package.name for package in PACKAGES} | {"lightning_fabric"}
    importers = {module_of(path) for path in files() if any(name.split(".")[0] in roots for name in imports(path))}
    assert importers == {"_compat.lightning_names"}


def test_few_modules_stand_at_the_root() -> None:
    assert {path.stem for path in PACKAGE.glob("*.py")} == {"__init__", "__main__", "public", *GROUND}


def test_each_room_says_what_it_may_import() -> None:
    for path in files():
        if path.name == "__init__.py" and path.parent.parent == PACKAGE:
            assert "May import " in (ast.get_docstring(tree_of(path)) or ""), module_of(path)


def test_nothing_else_of_the_engine_is_used() -> None:
    for path in files():
        if not module_of(path).startswith("sharding"):
            used = [name for name in own_imports(path) if name.startswith("sharding")]
            users_get = (ENGINE, "sharding.replica_optimizer")
            allowed = users_get if room_of(path) in ("public", "fabric") else (ENGINE,)
            found = [name for name in used if not name.startswith(allowed)]
            assert not found, f"{module_of(path)} imports {found}"


def room_of(path: Path) -> str:
    return module_of(path).split(".")[0]


def attributes_of(path: Path) -> set[str]:
    """The attributes that the classes of a file have, as far as the file tells."""
    found = set()
    for kind in (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)):
        found |= {
            each.target.id
            for each in kind.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        }
        found |= {name for owner, name in written(kind) if owner == "self"}
    return found


def written(tree: ast.AST) -> list[tuple[str, str]]:
    """What is assigned to attributes: of which object, which attribute."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)]
    return [(ast.unparse(node.value), node.attr) for node in nodes]


def strings(path: Path) -> list[str]:
    """The strings of a file; of those with holes, each part between two holes."""
    constants = [node.value for node in ast.walk(tree_of(path)) if isinstance(node, ast.Constant)]
    return [value for value in constants if isinstance(value, str)]


def test_keys_of_the_store_are_spelt_in_one_table() -> None:
    table = PACKAGE / "control" / "keys.py"
    first = {string.split("/")[0] for string in strings(table) if re.fullmatch(r"[a-z_]+/([a-z_]+/?)*", string)}
    assert len(first) > 15
    for path in files():
        found = [string for string in strings(path) if string.split("/")[0] in first and re.match(r"[a-z_]+/", string)]
        assert path == table or not found, f"{module_of(path)} spells {found}"


FOREIGN = {  # torch's and Lightning's
    ("parameter", "data"),
    ("metric", "value"),
    ("self._results", "batch"),
    ("self.trainer", "training"),
}


def test_nobody_writes_another_room_s_attributes() -> None:
    """What crosses rooms is passed. An attribute is known by its name: which rooms have classes with one like it."""
    rooms: dict[str, set[str]] = {}
    for path in files():
        for name in attributes_of(path):
            rooms.setdefault(name, set()).add(room_of(path))
    for path in files():
        if room_of(path) == "_compat":
            continue
        for owner, name in written(tree_of(path)):
            if owner not in ("self", "cls") and (owner, name) not in FOREIGN and name in rooms:
                assert room_of(path) in rooms[name], f"{module_of(path)} writes {owner}.{name} of {rooms[name]}"


def test_private_names_of_others_are_in_compat() -> None:
    for path in files():
        if room_of(path) != "_compat":
            foreign = [name for name in imports(path) if name.split(".")[0] in ("lightning", "torch", "torchmetrics")]
            found = [name for name in foreign if any(part.startswith("_") for part in name.split("."))]
            assert not found, f"{module_of(path)} imports {found}"


def without_values(kind: ast.ClassDef) -> set[str]:
    """The attributes that a class declares and does not set."""
    declared = (each for each in kind.body if isinstance(each, ast.AnnAssign) and each.value is None)
    return {each.target.id for each in declared if isinstance(each.target, ast.Name)}


def test_no_class_sets_what_its_base_class_only_declares() -> None:
    """Such a base class can be neither used nor read alone. An abstract property says the same, and is checked."""
    classes = {
        kind.name: kind
        for path in files()
        for kind in ast.walk(tree_of(path))
        if isinstance(kind, ast.ClassDef) and not any("dataclass" in ast.unparse(each) for each in kind.decorator_list)
    }
    bases = {name: [ast.unparse(each).split("[")[0] for each in kind.bases] for name, kind in classes.items()}

    def above(name: str) -> set[str]:
        direct = {each for each in bases[name] if each in classes}
        return direct.union(*map(above, direct))

    checked = 0
    for name in classes:
        for base in (each for each in above(name) if "Protocol" not in bases[each]):
            found = without_values(classes[base]) & {of for owner, of in written(classes[name]) if owner == "self"}
            assert not found, f"{name} sets {found} of {base}"
            checked += 1
    assert checked > 20


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


def test_only_devices_name_devices() -> None:
    for path in files():
        own = module_of(path)
        if not any(own == name or own.startswith(f"{name}.") for name in NAME_DEVICES):
            found = names_of_devices(path.read_text())
            assert not found, f"{own} names {found}"


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
        "FabricStrategy",
        "JoinCallback",
        "MegatronReplicaStrategy",
        "NPUAccelerator",
        "PeerRepair",
        "RankReplacement",
        "RecoveryCallback",
        "RecoveryError",
        "RecoveryReport",
        "ReplicaError",
        "ReplicaOptimizer",
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
from lightning.fabric.strategies import STRATEGY_REGISTRY
assert STRATEGY_REGISTRY["replica_zero"]["strategy"] is lightning_replica.FabricStrategy
lightning_replica.FabricStrategy.register_strategies(STRATEGY_REGISTRY)
from lightning.pytorch.accelerators import AcceleratorRegistry
assert "npu" in AcceleratorRegistry
lightning_replica.NPUAccelerator.register_accelerators(AcceleratorRegistry)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True)
