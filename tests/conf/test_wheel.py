"""The built wheel, alone: nothing of the source tree is on the path."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
USE = """
import sys
from hydra import compose, initialize_config_module
import lightning_replica
with initialize_config_module("lightning_replica.conf", version_base="1.3"):
    config = compose(overrides=["+trainer=replica_zero", "strategy.replicas=4"])
print(lightning_replica.__file__, config.strategy.replicas, config.trainer.devices)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    for name in ("lightning_replica", "conf", "tests", "examples"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "docs/package_index.md"):
        (source / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(out), "."]
    subprocess.run(build, cwd=source, check=True)
    return next(out.glob("*.whl"))


def test_its_files(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = next(name for name in names if name.endswith("entry_points.txt"))
        assert "lightning-replica = lightning_replica.__main__:main" in archive.read(info).decode()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"lightning_replica"}
    assert {name for name in names if name.endswith((".yaml", ".typed"))} == {
        "lightning_replica/conf/strategy/replica_zero.yaml",
        "lightning_replica/conf/strategy/replica_zero_megatron.yaml",
        "lightning_replica/conf/trainer/default.yaml",
        "lightning_replica/conf/trainer/replica_zero.yaml",
        "lightning_replica/py.typed",
    }


def test_its_description(wheel: Path) -> None:
    """What a package index shows: it has none of the project's other files, so nothing may lead there."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(name).decode()
    assert "Description-Content-Type: text/markdown" in text
    description = text.partition("\n\n")[2]
    assert description.strip() == (ROOT / "docs" / "package_index.md").read_text().strip()
    assert re.findall(r"\]\(([^)]*)\)", description) == []


def test_its_configuration(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    environment = {"PYTHONPATH": str(tmp_path), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", USE], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == [str(tmp_path / "lightning_replica" / "__init__.py"), "4", "4"], done.stderr
