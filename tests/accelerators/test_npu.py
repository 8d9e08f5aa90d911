"""``accelerator="npu"`` on a machine without one: every way in which that goes wrong, and what needs no NPU.

torch_npu is its real wheel, which misses CANN's libraries here, or a package with the wheel's names and signatures.
"""

import logging
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_replica import ConfigurationError, NPUAccelerator
from lightning_replica.accelerators.npu import chosen
from lightning_replica.devices import npu_package
from lightning_replica.launch.environment import RankEnvironment
from lightning_replica.launch.node_context import NodeContext
from tests.support.npu_wheel import NO_DEVICE, TWO_DEVICES, Wheel, at_hand, skeleton
from tests.support.ranks import run_ranks


@pytest.fixture(scope="module")
def wheel() -> Wheel:
    return at_hand()


@pytest.fixture
def unpacked(wheel: Wheel, tmp_path: Path) -> Iterator[Path]:
    """The whole wheel, as it is installed: 130 MB, which need not be kept."""
    yield wheel.unpack(tmp_path / "wheel")
    shutil.rmtree(tmp_path / "wheel")


def refused(rank: int, store: Any, folder: str) -> list[Any]:
    """What a trainer says, and whether others still find their way."""
    sys.path.insert(0, folder)
    try:
        L.Trainer(accelerator="npu", devices=2, strategy="replica_zero", logger=False)
    except ConfigurationError as error:
        L.Trainer(accelerator="cpu", devices=1, logger=False)
        return [str(error), NPUAccelerator.is_available()]
    return ["nothing", True]


def message(folder: Path) -> str:
    ((said, available),) = run_ranks(1, refused, str(folder))
    assert available is False
    return str(said)


@pytest.mark.skipif(npu_package.is_installed(), reason="torch_npu is installed")
def test_torch_npu_is_missing(tmp_path: Path) -> None:
    said = message(tmp_path)
    assert "An NPU needs torch_npu, which is not installed." in said
    assert f'`pip install "lightning-replica[npu]" torch=={torch.__version__.split("+")[0]}`' in said


def test_torch_npu_is_made_for_another_torch(wheel: Wheel, tmp_path: Path) -> None:
    said = message(skeleton(wheel, tmp_path, TWO_DEVICES, torch_version="2.1.0"))
    assert said.startswith(f"torch_npu 2.1.0 is made for torch==2.1.0, but torch is {torch.__version__}. Install two")
    ours = ".".join(torch.__version__.split(".")[:2])
    assert said.endswith(f"`pip install torch_npu=={ours}.*`, or `torch==2.1.0`.")


def test_torch_npu_cannot_be_imported(unpacked: Path) -> None:
    said = message(unpacked)
    assert "cannot be imported: ImportError: libhccl.so: cannot open shared object file" in said
    assert "Is CANN installed, and its `set_env.sh` sourced?" in said


def test_there_is_no_npu(wheel: Wheel, tmp_path: Path) -> None:
    folder = skeleton(wheel, tmp_path, NO_DEVICE)
    assert "finds no NPU. `npu-smi info` lists those of the machine. In a container" in message(folder)


def test_all_npus_are_hidden(wheel: Wheel, tmp_path: Path) -> None:
    ((said, _),) = run_ranks(1, hidden, str(skeleton(wheel, tmp_path, NO_DEVICE)))
    assert "of the machine; ASCEND_RT_VISIBLE_DEVICES='' selects among them" in said


def hidden(rank: int, store: Any, folder: str) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASCEND_RT_VISIBLE_DEVICES", "")
        return refused(rank, store, folder)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_lightnings_own_message_about_others_is_left_alone() -> None:
    with pytest.raises(MisconfigurationException, match=r"can not run on your system.*'cpu'"):
        L.Trainer(accelerator="cuda", devices=1)


@pytest.mark.parametrize(
    ("devices", "indices"),
    [
        (2, [0, 1]),
        ("2", [0, 1]),
        ([0, 2], [0, 2]),
        ("0,2", [0, 2]),
        ("2,", [2]),
        (-1, [0, 1, 2, 3]),
        ("-1", [0, 1, 2, 3]),
    ],
)
def test_devices_are_chosen_as_gpus_are(devices: Any, indices: list[int]) -> None:
    assert chosen(devices, 4) == indices


@pytest.mark.parametrize("devices", [5, [4], [1, 1], "1,1", "two", [0, "1"], True, [True], -2, "", [-1], 1.5, None])
def test_devices_that_make_no_sense(devices: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^devices=.* does not fit 4 NPUs \(0 to 3\).*, or -1 for all"):
        chosen(devices, 4)


def test_more_than_there_are() -> None:
    with pytest.raises(ConfigurationError, match=r"devices=2 does not fit 1 NPU \(0\)"):
        chosen(2, 1)


def used(rank: int, store: Any, folder: str) -> Any:
    sys.path.insert(0, folder)
    own = NPUAccelerator()
    with pytest.raises(ConfigurationError, match="accelerator='npu' cannot train on 'cpu'"):
        own.setup_device(torch.device("cpu"))
    (_, device) = own.get_parallel_devices(own.parse_devices(own.auto_device_count()))
    own.setup_device(device)
    with pytest.raises(ConfigurationError, match=r"precision='16-mixed' must see gradients overflow"):
        own.setup(SimpleNamespace(precision_plugin=MixedPrecision("16-mixed", "npu")))  # type: ignore[arg-type]
    own.setup(SimpleNamespace(precision_plugin=MixedPrecision("bf16-mixed", "npu")))  # type: ignore[arg-type]
    own.teardown()
    return [str(device), own.get_device_stats(device), own.is_available()]


def test_what_lightning_asks_of_it(wheel: Wheel, tmp_path: Path) -> None:
    stats = {
        "allocated_bytes.all.current": 7,
        "memory.free_bytes": 3,
        "memory.total_bytes": 9,
        "utilization.percent": 40,
    }
    assert run_ranks(1, used, str(skeleton(wheel, tmp_path, TWO_DEVICES))) == [["npu:1", stats, True]]


def constructed(rank: int, store: Any, folder: str) -> Any:
    sys.path.insert(0, folder)
    handler = Lines()
    logging.getLogger("lightning_replica.devices").addHandler(handler)
    os.environ["TORCH_HCCL_BLOCKING_WAIT"] = "1"
    # As a rank: any other process becomes the supervisor here.
    context = NodeContext.alone(2, store.port)
    os.environ |= RankEnvironment(context.store, os.getppid(), 0).variables(0, context, {})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            options: dict[str, Any] = {"devices": [1, 0], "strategy": "replica_zero", "logger": False}
            trainer = L.Trainer(accelerator="npu", precision="16-mixed", **options)
    plugin: Any = trainer.precision_plugin
    assert not [each for each in caught if "GradScaler" in str(each.message)]
    devices = [str(device) for device in trainer.strategy.parallel_devices or ()]  # type: ignore[attr-defined]
    set_now = os.environ["TORCH_HCCL_ASYNC_ERROR_HANDLING"]
    return [devices, plugin.device, plugin.scaler._device, plugin.scaler.is_enabled(), set_now, handler.lines]


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_a_trainer_for_npus(wheel: Wheel, tmp_path: Path) -> None:
    """Up to where it would train; what defeats recovery is warned of, once."""
    (found,) = run_ranks(1, constructed, str(skeleton(wheel, tmp_path, TWO_DEVICES)))
    (line,) = found.pop()
    assert line.startswith("TORCH_HCCL_BLOCKING_WAIT=1: With it, a rank that waits for a lost one cannot be called")
    assert found == [["npu:1", "npu:0"], "npu", "npu", True, "0"]
