"""Lightning's two packages: a process uses the one that its script uses, and a script that mixes them is told so."""

import ast
import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Protocol

import pytest

from lightning_replica._compat import lightning_names, packages, versions
from lightning_replica._compat.packages import LIGHTNING, PACKAGES, PYTORCH_LIGHTNING, VARIABLE
from lightning_replica.errors import VersionError
from tests.support.bare_python import BarePython

both = pytest.mark.skipif(
    not all(package.is_installed() for package in PACKAGES), reason="needs both packages of Lightning"
)
USE = """
trainer = {0}.Trainer(strategy={1}, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
assert isinstance(trainer.strategy, {0}.strategies.Strategy)
import sys
print(type(trainer.strategy).__name__, *sorted({{"lightning", "pytorch_lightning"}} & set(sys.modules)))
"""
IMPORTS = {
    "lightning, then ours": ("import lightning.pytorch as pl\nimport lightning_replica", LIGHTNING),
    "ours, then lightning": ("import lightning_replica\nimport lightning.pytorch as pl", LIGHTNING),
    "pytorch_lightning, then ours": ("import pytorch_lightning as pl\nimport lightning_replica", PYTORCH_LIGHTNING),
    "ours, then pytorch_lightning": ("import lightning_replica\nimport pytorch_lightning as pl", PYTORCH_LIGHTNING),
    "its Fabric first": (
        "import lightning_replica\nimport lightning_fabric\nimport pytorch_lightning as pl",
        PYTORCH_LIGHTNING,
    ),
}


# The script is a rank: as a supervisor it would start others, which import everything once more.
OF_TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "test",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    **dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0"),
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1"),
}


class Run(Protocol):
    def __call__(self, text: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        """Runs a script of this text."""


@pytest.fixture
def run(tmp_path: Path, python: BarePython) -> Run:
    def run(text: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        script = tmp_path / "script.py"
        script.write_text(text)
        return python.run(script, **{**OF_TORCHRUN, **variables})

    return run


@both
@pytest.mark.parametrize("name", ['"replica_zero"', "lightning_replica.ReplicaZeroStrategy(replicas=1)"])
@pytest.mark.parametrize("order", IMPORTS)
def test_the_package_of_the_script_is_used(order: str, name: str, run: Run) -> None:
    imports, package = IMPORTS[order]
    done = run(imports + USE.format("pl", name))
    assert done.stdout.splitlines()[-1:] == [f"ReplicaZeroStrategy {package.name}"], done.stderr


@both
def test_our_classes_may_be_imported_before_lightning(run: Run) -> None:
    """As tools that sort imports do it."""
    ours = "from lightning_replica import ReplicaZeroStrategy\n"
    for package in PACKAGES:
        use = USE.format("pl", "ReplicaZeroStrategy()")
        done = run(f"{ours}import {package.pytorch} as pl{use}")
        assert done.stdout.splitlines()[-1:] == [f"ReplicaZeroStrategy {package.name}"], done.stderr


MIXED = "import lightning.pytorch\nimport lightning_replica\nimport pytorch_lightning as pl"


@both
def test_a_name_in_the_other_package(run: Run) -> None:
    done = run(MIXED + USE.format("pl", '"replica_zero"'))
    assert done.returncode == 1
    said = "works with lightning.pytorch in this process, and pytorch_lightning asked for it"
    assert said in done.stderr
    assert f"set {VARIABLE}=pytorch_lightning" in done.stderr
    done = run(MIXED + USE.format("pl", '"replica_zero"'), **{VARIABLE: "pytorch_lightning"})
    assert done.stdout.splitlines()[-1:] == ["ReplicaZeroStrategy lightning pytorch_lightning"], done.stderr


@both
def test_an_object_in_the_other_package(run: Run) -> None:
    done = run(MIXED + USE.format("pl", "lightning_replica.ReplicaZeroStrategy()"))
    assert done.returncode == 1
    assert "<ReplicaZeroStrategy for lightning.pytorch, not for pytorch_lightning" in done.stderr


@both
def test_fabric_of_either_package(run: Run) -> None:
    use = 'print(type(Fabric(strategy="replica_zero", accelerator="cpu", devices=1).strategy).__name__)'
    for package in PACKAGES:
        done = run(f"import lightning_replica\nfrom {package.fabric} import Fabric\n{use}")
        assert done.stdout.splitlines()[-1:] == ["FabricStrategy"], done.stderr


@both
@pytest.mark.combinations
def test_a_killed_rank_under_either_package(tmp_path: Path) -> None:
    found = {}
    runs: list[tuple[packages.Package, list[str]]] = [
        (LIGHTNING, []),
        (PYTORCH_LIGHTNING, []),
        (PYTORCH_LIGHTNING, ["--kill", "1"]),
    ]
    for package, kill in runs:
        result = tmp_path / f"{package.name}{len(kill)}"
        subprocess.run(
            [sys.executable, "-m", "lightning_replica.cli.smoke", str(result), *kill],
            env={**os.environ, VARIABLE: package.name},
            check=True,
            timeout=180,
            capture_output=True,
        )
        found[result.name] = result.read_text()
    assert len(found) == 3
    assert len(set(found.values())) == 1, found


def test_a_part_of_the_package_without_an_import_of_its_own(run: Run) -> None:
    done = run("import lightning_replica\nprint(lightning_replica.callbacks.RankReplacement.__name__)")
    assert done.stdout.split() == ["RankReplacement"], done.stderr


def test_a_name_that_is_no_package(run: Run) -> None:
    done = run("import lightning_replica.trainer.strategy", **{VARIABLE: "thunder"})
    assert f"{VARIABLE}='thunder' names no package of Lightning" in done.stderr


def test_nothing_of_lightning_is_imported_before_the_script_does(run: Run) -> None:
    done = run("import lightning_replica, sys; print([name.partition('.')[0] for name in sys.modules])")
    loaded = set(ast.literal_eval(done.stdout))
    assert "lightning_replica" in loaded
    assert not loaded & {"lightning", "pytorch_lightning", "lightning_fabric"}


def test_a_module_of_ours_by_its_own_path(run: Run) -> None:
    """It imports Lightning by itself, while it is only half imported."""
    ours = "from lightning_replica.trainer.strategy import ReplicaZeroStrategy\n"
    done = run(f"{ours}import lightning_replica\nprint(lightning_replica.ReplicaZeroStrategy is ReplicaZeroStrategy)")
    assert done.stdout.splitlines()[-1:] == ["True"], done.stderr


@pytest.mark.parametrize(
    "first", ["from lightning_replica.callbacks import RankReplacement", "import lightning_replica.conf"]
)
def test_a_name_after_a_module_of_ours(first: str, run: Run) -> None:
    """Another module of ours imports Lightning, or none does, and then the name is asked for."""
    name = '"replica_zero"'
    done = run(f"{first}\nimport lightning.pytorch as pl{USE.format('pl', name)}")
    assert done.stdout.splitlines()[-1:] == ["ReplicaZeroStrategy lightning"], done.stderr


def test_what_is_watched_is_as_if_nobody_watched(run: Run) -> None:
    """The loader of a module finds its source and its files."""
    done = run(
        "import inspect, lightning_replica, lightning.pytorch as pl\n"
        "print(type(pl.__loader__).__name__, type(pl.__spec__.loader).__name__, len(inspect.getsource(pl)) > 100)",
    )
    assert done.stdout.split() == ["SourceFileLoader", "SourceFileLoader", "True"], done.stderr


def test_both_halves_import_the_same() -> None:
    tree = ast.parse(Path(lightning_names.__file__).read_text())
    (choice,) = (node for node in ast.walk(tree) if isinstance(node, ast.If))

    def imported(body: list[ast.stmt], package: packages.Package) -> list[str]:
        text = "\n".join(map(ast.unparse, body))
        for own, common in ((package.pytorch, "PYTORCH"), (package.fabric, "FABRIC")):
            text = text.replace(f"from {own} ", f"from {common} ").replace(f"from {own}.", f"from {common}.")
            text = text.replace(f"import {own} as", f"import {common} as")
        return sorted(text.splitlines())

    found = imported(choice.body, LIGHTNING)
    assert len(found) > 30
    assert all("PYTORCH" in line or "FABRIC" in line for line in found)
    assert found == imported(choice.orelse, PYTORCH_LIGHTNING)


def test_a_version_of_lightning_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "_installed", lambda _: "2.5.6")
    with pytest.raises(VersionError, match="pytorch-lightning 2.5.6 is installed, and"):
        versions.check_version("pytorch-lightning", versions.LIGHTNING_VERSIONS)


def of_a_script(text: str | bytes, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[packages.Package]:
    script = folder / "script.py"
    script.write_bytes(text if isinstance(text, bytes) else text.encode())
    main = types.ModuleType("__main__")
    main.__file__ = str(script)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.delitem(sys.modules, "__mp_main__", raising=False)
    return [*packages._in_script()]


@pytest.mark.parametrize(
    "text",
    [
        b"\xef\xbb\xbfimport pytorch_lightning",
        b"# coding: latin-1\nname = '\xe9'\nimport pytorch_lightning",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import lightning\nimport pytorch_lightning",
        "import typing\nif typing.TYPE_CHECKING:\n    import lightning\nelse:\n    import pytorch_lightning",
        "import lightning_fabric.utilities",
        "def main():\n    from pytorch_lightning.callbacks import Timer",
    ],
)
def test_what_a_script_imports(text: str | bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_a_script(text, tmp_path, monkeypatch) == [PYTORCH_LIGHTNING]


@pytest.mark.parametrize("text", ["print('", "from . import lightning", "import lightning_utilities", b"\xff\x00"])
def test_a_script_that_shows_no_package(text: str | bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_a_script(text, tmp_path, monkeypatch) == []


def test_the_top_of_a_script_counts_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "def main():\n    import lightning\nimport pytorch_lightning"
    assert of_a_script(text, tmp_path, monkeypatch) == [PYTORCH_LIGHTNING, LIGHTNING]


@both
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_process_that_the_script_starts_uses_the_same(method: str, run: Run) -> None:
    """As a worker of a DataLoader that does not fork."""
    text = f"""
import multiprocessing
from lightning_replica._compat.packages import chosen
print(chosen().name, flush=True)
import pytorch_lightning

def work():
    pass

if __name__ == "__main__":
    child = multiprocessing.get_context("{method}").Process(target=work)
    child.start()
    child.join()
"""
    assert run(text).stdout.split() == ["pytorch_lightning"] * 2


def test_one_that_alone_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.Package, "is_installed", lambda package: package is PYTORCH_LIGHTNING)
    monkeypatch.setattr(packages.Package, "version", lambda _: "2.5.0")
    assert packages._usable() is PYTORCH_LIGHTNING  # and is refused by its version


def test_one_that_alone_is_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library has imported the other one, in a version that is too old."""
    monkeypatch.setattr(packages.Package, "is_installed", lambda _: True)
    monkeypatch.setattr(packages.Package, "version", lambda package: "2.6.1" if package is LIGHTNING else "2.5.0")
    monkeypatch.setattr(packages, "_imported", lambda: iter([PYTORCH_LIGHTNING]))
    assert packages._usable() is LIGHTNING


def test_a_folder_of_that_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "a_folder_with_logs"
    folder = packages.Package(name, name, name, name)
    (tmp_path / name).mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.util.find_spec(name) is not None
    assert not folder.is_installed()
    (tmp_path / name / "__init__.py").touch()
    importlib.invalidate_caches()
    assert folder.is_installed()


@pytest.mark.parametrize("stub", ["None", "types.ModuleType('lightning.pytorch')", "unittest.mock.MagicMock()"])
def test_something_else_in_the_place_of_a_package(stub: str, run: Run) -> None:
    """Tests of other projects put it there."""
    names = "('lightning', 'lightning.pytorch')"
    hidden = f"import sys, types, unittest.mock\nfor name in {names}:\n    sys.modules[name] = {stub}"
    done = run(f"{hidden}\nimport lightning_replica\nprint('imported')")
    assert done.stdout.split() == ["imported"], done.stderr


def test_reading_what_is_watched(run: Run) -> None:
    done = run(
        "import lightning_replica, importlib.util, importlib, sys\n"
        "spec = importlib.util.find_spec('lightning.pytorch')\n"
        "print(len(spec.loader.get_source('lightning.pytorch')) > 100)\n"
        "importlib.reload(lightning_replica)\n"
        "print([type(finder).__name__ for finder in sys.meta_path].count('_Watch'))",
    )
    assert done.stdout.split() == ["True", "1"], done.stderr


def test_hydras_trainer_is_that_of_the_package(run: Run) -> None:
    pytest.importorskip("hydra")
    text = """
import hydra, lightning_replica.conf
from lightning_replica._compat.packages import chosen
with hydra.initialize_config_module("lightning_replica.conf", version_base=None):
    trainer = hydra.utils.instantiate(hydra.compose("trainer/replica_zero", ["trainer.devices=1"]).trainer)
print(type(trainer).__module__.partition(".")[0], chosen().name)
"""
    done = run(text)
    assert len(set(done.stdout.split())) == 1, done.stderr
    if all(package.is_installed() for package in PACKAGES):
        done = run(text, **{VARIABLE: "pytorch_lightning"})
        assert set(done.stdout.split()) == {"pytorch_lightning"}, done.stderr


HIDDEN = "import sys\nfor name in ('lightning', 'pytorch_lightning', 'lightning_fabric'): sys.modules[name] = None\n"
COMMAND = "from lightning_replica.__main__ import main\nsys.exit(main({!r}))"


def test_the_command_line_without_lightning(run: Run) -> None:
    """The doctor has to work, as it says what is missing."""
    done = run(HIDDEN + COMMAND.format(["plan", "--help"]))
    assert done.returncode == 0, done.stderr
    done = run(HIDDEN + COMMAND.format(["chaos", "--runs", "2", "--", "python", "train.py"]))
    assert done.returncode == 2
    assert "`chaos` cannot run: " in done.stderr
    assert "No module named 'lightning" in done.stderr
    assert "`lightning-replica doctor` says what is missing" in done.stderr
