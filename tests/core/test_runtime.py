"""What a rank runs, each source with a digest or a version."""

import importlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig

from lightning_replica.core import runtime
from tests.support import forked_python
from tests.support.hydra_scripts import needs_hydra

HYDRA = """
import hydra
from lightning_replica import DyingGaspCheckpoint

@hydra.main(config_path=".", config_name="train", version_base=None)
def main(cfg):
    DyingGaspCheckpoint(cfg.path)

main()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the user's, with a package whose parts are forgotten afterwards."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("__version__ = '1'")
    (tmp_path / "mine" / "model.py").write_text("WIDTH = 2")
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_modules_of_the_user_that_were_imported(folder: Path) -> None:
    before = runtime.sources()
    importlib.import_module("mine.model")
    first = runtime.sources()
    assert set(first) - set(before) == {"module mine", "module mine.model"}
    (folder / "mine" / "model.py").write_text("WIDTH = 3")
    second = runtime.sources()
    assert {name for name in first if first[name] != second[name]} == {"module mine.model"}


def test_comments_and_layout_do_not_count(folder: Path) -> None:
    importlib.import_module("mine.model")
    file = folder / "mine" / "model.py"
    first = runtime.sources()
    file.write_text("# How wide it is\n\nWIDTH  =  2\n")
    assert runtime.sources() == first
    file.write_text("WIDTH = (2")
    assert runtime.sources() != first


def test_a_file_that_an_installed_package_has_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile loads what it writes as a module of its own, and each rank may have compiled something else."""
    made = importlib.import_module("mine.model")
    monkeypatch.setitem(sys.modules, "torch._inductor.codecache.cabc", made)
    assert not [name for name in runtime.sources() if "cabc" in name]


def test_a_file_that_was_removed_since(folder: Path) -> None:
    importlib.import_module("mine.model")
    (folder / "mine" / "model.py").unlink()
    assert "module mine.model" not in runtime.sources()


def test_installed_packages() -> None:
    found = runtime.sources()
    assert found["package torch"] == torch.__version__
    assert not [name for name in found if name.startswith(("module torch", "module lightning_replica"))]


@pytest.mark.parametrize("argument", ["{}", "--config={}", "data.options={}"])
def test_configuration_files_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argument: str
) -> None:
    file, data = tmp_path / "options.yaml", tmp_path / "data.bin"
    file.write_text("lr: 1")
    data.write_text("lr: 1")
    monkeypatch.setattr(sys, "argv", ["train.py", argument.format(file), argument.format(data), "--lr", "2"])
    first = {name: value for name, value in runtime.sources().items() if name.startswith("file")}
    assert list(first) == [f"file {file}"]
    file.write_text("lr: 2")
    assert runtime.sources()[f"file {file}"] != first[f"file {file}"]


def test_configuration_files_that_hydra_has_read(tmp_path: Path) -> None:
    from hydra import compose, initialize_config_dir
    from hydra.core.hydra_config import HydraConfig

    (tmp_path / "optimizer").mkdir()
    (tmp_path / "train.yaml").write_text("defaults: [{optimizer: sgd}, _self_]\nlr: 1")
    for name in ("optimizer/sgd", "optimizer/adam", "other"):
        (tmp_path / f"{name}.yaml").write_text("a: 1")
    with initialize_config_dir(str(tmp_path), version_base=None):
        composed = compose("train", return_hydra_config=True)
        assert isinstance(composed, DictConfig)
        HydraConfig.instance().set_config(composed)
        try:
            found = runtime.sources()
        finally:
            HydraConfig.instance().cfg = None
    read = {name for name in found if name.startswith("configuration")}
    assert read == {"configuration train.yaml", "configuration optimizer/sgd.yaml"}


@needs_hydra
@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ([], r"DirpathOf/outputs/[0-9-]+/[0-9-]+/last"),
        (["hydra.job.chdir=true", "path=last"], r"DirpathOf/outputs/[0-9-]+/[0-9-]+/last"),
        (["hydra.run.dir=fixed"], None),
        (["path=last"], None),
    ],
)
def test_checkpoints_in_a_directory_of_this_start(arguments: list[str], found: str | None, tmp_path: Path) -> None:
    """Hydra's own default, as many templates have it: the run that starts again would begin anew without a word."""
    (tmp_path / "train.yaml").write_text("path: ${hydra:runtime.output_dir}/last")
    (tmp_path / "train.py").write_text(HYDRA)
    line = [sys.executable, "train.py", *arguments]
    done = forked_python.run(line, tmp_path, dict(os.environ), tmp_path / "printed", timeout=100)
    assert done.returncode == 0, done.stdout
    said = re.findall(r"dirpath='(.*)' is in the directory that Hydra has made for this start", done.stdout)
    assert len(said) == (found is not None), done.stdout
    if found is not None:
        assert re.fullmatch(found.replace("DirpathOf", str(tmp_path)), said[0].replace("//", "/")), said


def test_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    before = runtime.hardware("cpu", True)
    assert torch.backends.cpu.get_cpu_capability() in before["processor"]
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    assert dict(runtime.hardware("cpu", True).items() - before.items()) == {"MKL_CBWR": "AVX2"}
