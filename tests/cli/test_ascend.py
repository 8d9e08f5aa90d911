"""What `lightning-replica doctor` says where torch_npu is installed."""

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_replica.cli.ascend import ascend
from lightning_replica.cli.checks import devices
from lightning_replica.devices import npu_package
from tests.support.npu_wheel import NO_DEVICE, TWO_DEVICES, Wheel, at_hand, skeleton
from tests.support.ranks import run_ranks

Found = dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def wheel() -> Wheel:
    return at_hand()


def look(rank: int, store: Any, folder: str, environment: dict[str, str]) -> list[Any]:
    sys.path.insert(0, folder)
    os.environ.update(environment)
    return [asdict(check) for check in (*devices(), *ascend())]


def found(folder: Path, **environment: str) -> Found:
    (checks,) = run_ranks(1, look, str(folder), environment)
    return {check["name"]: check for check in checks}


@pytest.mark.skipif(npu_package.is_installed(), reason="torch_npu is installed")
def test_nothing_where_it_is_not_installed(tmp_path: Path) -> None:
    checks = found(tmp_path)
    assert set(checks) == {"cpu", "cuda", "npu"}
    assert (checks["npu"]["status"], checks["npu"]["found"]) == ("note", "none")


def test_an_ascend_machine(wheel: Wheel, tmp_path: Path) -> None:
    checks = found(skeleton(wheel, tmp_path, TWO_DEVICES))
    assert checks["npu"]["found"] == "Ascend910B, Ascend910B"
    assert checks["torch_npu"]["status"] == "ok"
    assert checks["CANN"]["found"] == "8.3.RC1"
    assert (checks["Ascend driver"]["status"], checks["Ascend driver"]["found"]) == ("note", "not known")
    assert checks["torch_npu calls"]["status"] == "ok"
    assert checks["HCCL settings"]["status"] == "ok"


def test_versions_that_do_not_belong_together(wheel: Wheel, tmp_path: Path) -> None:
    checks = found(skeleton(wheel, tmp_path, TWO_DEVICES, torch_version="2.1.0"))
    assert checks["torch_npu"]["status"] == "failed"
    assert checks["torch_npu"]["found"] == f"torch_npu 2.1.0 is made for torch==2.1.0, but torch is {torch.__version__}"
    assert checks["torch_npu"]["advice"].startswith("Install two that match: `pip install torch_npu==")
    assert "torch_npu calls" not in checks


def test_settings_and_calls_that_are_wrong(wheel: Wheel, tmp_path: Path) -> None:
    folder = skeleton(wheel, tmp_path, NO_DEVICE)
    module = folder / "torch_npu" / "npu" / "__init__.py"
    module.write_text(module.read_text().replace("def restart_device(", "def start_device("))
    checks = found(folder, HCCL_ASYNC_ERROR_HANDLING="1")
    assert checks["HCCL settings"]["status"] == "note"
    assert checks["HCCL settings"]["found"] == "HCCL_ASYNC_ERROR_HANDLING=1"
    assert "Set HCCL_ASYNC_ERROR_HANDLING=0." in checks["HCCL settings"]["advice"]
    assert checks["torch_npu calls"]["status"] == "failed"
    assert checks["torch_npu calls"]["found"] == "torch_npu.npu.restart_device is missing"
    assert checks["CANN"]["status"] == "note"  # the skeleton raises there
    assert checks["npu"]["found"] == "none"
