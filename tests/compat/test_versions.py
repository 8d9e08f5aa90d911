"""A version whose private names do not fit is refused at import, and what is claimed is what was tested."""

import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from lightning_replica._compat.packages import chosen
from lightning_replica._compat.versions import (
    LIGHTNING_VERSIONS,
    TESTED,
    TORCH_VERSIONS,
    check_version,
    need,
    need_in_instances,
    need_parameters,
    private_names_of,
    supports,
)
from lightning_replica.errors import ReplicaError, VersionError
from tests.support.bare_python import BarePython

ROOT = Path(__file__).parents[2]


def requirements() -> dict[str, Requirement]:
    text = (ROOT / "pyproject.toml").read_text()
    block = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.M | re.S)
    assert block is not None
    found = [Requirement(line) for line in re.findall(r'^    "(.+?)",', block[1], re.M)]
    return {each.name: each for each in found}


@pytest.mark.parametrize(
    ("spoil", "package", "missing"),
    [
        (
            "import torch.distributed.distributed_c10d as m; del m._new_process_group_helper",
            "torch",
            "_new_process_group",
        ),
        ("from torch.distributed import ProcessGroup as g; del g._set_group_desc", "torch", "_set_group_desc"),
        (
            "from torch.utils.data._utils import signal_handling as m; del m._remove_worker_pids",
            "torch",
            "_remove_worker",
        ),
        ("import lightning.pytorch.loops as m; del m._FitLoop", chosen().distribution, "_FitLoop"),
        (
            "from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector as c;"
            " del c._sigterm_notifier_fn",
            chosen().distribution,
            "_sigterm_notifier_fn",
        ),
    ],
)
def test_a_name_that_is_gone(spoil: str, package: str, missing: str, python: BarePython, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"{spoil}\nimport lightning.pytorch, lightning_replica\nprint('imported')")
    done = python.run(script)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1, done.stdout
    assert re.search(rf"VersionError: lightning-replica does not work with {package} \d.*{missing}", last), last
    assert f"It is tested with {package} {TESTED[package][0]} to {TESTED[package][1]}" in last
    assert "report this on the issue page" in last


def test_a_version_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_replica._compat.versions._installed", lambda _: "2.7.1+cu126")
    with pytest.raises(VersionError, match=r"torch 2.7.1\+cu126 is installed, and .* works with torch>=2.9"):
        check_version("torch", TORCH_VERSIONS)


@pytest.mark.parametrize("version", ["2.9.0", "2.9.0a0+nv25.6", "2.9.0.dev20250801", "2.14.1+cpu"])
def test_builds_between_releases_are_supported(version: str) -> None:
    assert supports(TORCH_VERSIONS, version)
    assert not supports(TORCH_VERSIONS, "2.8.0+cu126")


@pytest.mark.parametrize(
    "text", ["import not_there", "import not_there.torch", "from json import torch", "import torch_not_there"]
)
def test_the_error_of_another_package_stays(text: str) -> None:
    """As of a torchvision that does not fit torch, which Lightning imports."""
    with pytest.raises(ImportError) as found, private_names_of("torch"):
        exec(text)
    assert not isinstance(found.value, VersionError)


@pytest.mark.parametrize("text", ["import torch.not_there", "from torch import not_there", "import torch.nn.gone.too"])
def test_a_module_that_is_gone(text: str) -> None:
    with pytest.raises(VersionError, match="does not work with torch"), private_names_of("torch"):
        exec(text)


def test_a_package_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ModuleNotFoundError) as found, private_names_of("torch"):
        exec("import torch")
    assert not isinstance(found.value, VersionError)


class Connector:
    """As one of Lightning's: some attributes exist in instances only."""

    kind = 1

    def __init__(self) -> None:
        self.in_init = 1

    @property
    def known(self) -> int:
        return self.in_property

    in_property = 2

    def take(self, batch: int, *, sample: int) -> None: ...


def test_what_is_needed() -> None:
    need(Connector, "kind", "take")
    need_in_instances(Connector, "kind", "in_init", "in_property", "take")
    need_parameters(Connector.take, "batch", "sample")
    need_parameters(lambda **_: None, "anything")
    with pytest.raises(AttributeError, match="Connector has no `in_init`"):
        need(Connector, "in_init")
    with pytest.raises(AttributeError, match="instances of Connector have no `gone`"):
        need_in_instances(Connector, "in_init", "gone")
    with pytest.raises(AttributeError, match=r"Connector\.take takes no `other`"):
        need_parameters(Connector.take, "batch", "other")


def test_the_error_can_be_caught_as_what_it_is() -> None:
    with pytest.raises(ImportError, match="torch") as caught, private_names_of("torch"):
        need(Connector, "gone")
    assert isinstance(caught.value, VersionError)
    assert isinstance(caught.value, ReplicaError)


def test_what_is_required_is_what_was_tested() -> None:
    wanted = requirements()
    assert wanted["lightning"].specifier == LIGHTNING_VERSIONS
    assert wanted["torch"].specifier == TORCH_VERSIONS
    for name in ("torch", "lightning", "numpy"):
        lowest, newest = TESTED[name]
        specifier = wanted[name].specifier
        assert specifier.contains(lowest), name
        assert specifier.contains(newest), name
        bound = next(each.version for each in specifier if each.operator == ">=")
        assert SpecifierSet(f"=={bound}").contains(lowest), f"{name}: {bound} is claimed, {lowest} was tested"
    python = re.search(r'requires-python = ">=(.*)"', (ROOT / "pyproject.toml").read_text())
    assert python is not None
    assert python[1] == TESTED["python"][0]


def test_the_page_shows_that_it_was_tested() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / "docs" / "compatibility.md").read_text().splitlines()
        if line.startswith("| ") and " passed, " in line
    ]
    if not rows:
        pytest.skip("scripts/matrix has written no row yet")
    assert all("no" not in row and row[-2].endswith(", 0 failed") for row in rows)
    columns = {"python": 1, "torch": 2, "lightning": 3, "numpy": 4}
    for package, column in columns.items():
        shown = {row[column].partition("+")[0] for row in rows if row[0] != "pytorch_lightning"}
        assert set(TESTED[package]) <= shown, package
    (other,) = (row for row in rows if row[0] == "pytorch_lightning")
    assert other[3] == TESTED["pytorch-lightning"][1]
