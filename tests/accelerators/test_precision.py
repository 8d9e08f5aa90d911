"""Mixed precision with an accelerator that Lightning does not know by name."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.accelerators import AcceleratorRegistry, CPUAccelerator
from lightning.pytorch.plugins import MixedPrecision

from lightning_replica import ConfigurationError, ReplicaZeroStrategy
from tests.support import world
from tests.support.doubles import overriding
from tests.support.job import Case
from tests.trainer.scenarios import Net, Overflows

DISABLED = "GradScaler is enabled, but CUDA is not available"
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="Lightning's guess is right")


@overriding()
class ThirdParty(CPUAccelerator):
    """Somebody's, whose devices are the CPU."""

    @staticmethod
    def name() -> str:
        return "third_party"


class Own(MixedPrecision):
    """Somebody's."""


def trainer(**options: Any) -> L.Trainer:
    return L.Trainer(accelerator=ThirdParty(), devices=2, strategy="replica_zero", logger=False, **options)


def test_it_autocasts_where_the_accelerator_trains() -> None:
    plugin: Any = trainer(precision="bf16-mixed").precision_plugin
    assert (plugin.device, plugin.scaler) == ("cpu", None)


@no_gpu
def test_the_loss_is_scaled() -> None:
    with pytest.warns(UserWarning, match=DISABLED):
        guessed = MixedPrecision("16-mixed", "cuda")
    assert guessed.scaler is not None
    assert not guessed.scaler.is_enabled()  # what Lightning makes, and what would train with no scale at all
    with pytest.warns(UserWarning, match=DISABLED):
        plugin: Any = trainer(precision="16-mixed").precision_plugin
    assert plugin.device == plugin.scaler._device == "cpu"
    assert plugin.scaler.is_enabled()


def test_what_the_user_gives_is_kept_or_refused() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    plugin: Any = trainer(plugins=MixedPrecision("16-mixed", "cpu", scaler)).precision_plugin
    assert plugin.scaler is scaler
    plugin = trainer(plugins=MixedPrecision("16-mixed", "cuda", scaler)).precision_plugin  # as if Lightning's
    assert (plugin.device, plugin.scaler) == ("cpu", scaler)
    with pytest.raises(
        ConfigurationError, match=r"'bf16-mixed' is for cuda, but the accelerator is cpu. Give its plugin"
    ):
        trainer(plugins=Own("bf16-mixed", "cuda"))


def train(case: Any, out: Path) -> None:
    """Under the third party's accelerator by name, then with the very plugin that Lightning has for the CPU."""
    torch.set_num_threads(1)
    AcceleratorRegistry.register("third_party", ThirdParty)
    for precision in ("bf16-mixed", "16-mixed"):
        ways: list[dict[str, Any]] = [
            {"accelerator": "third_party", "precision": precision},
            {"accelerator": "cpu", "plugins": MixedPrecision(precision, "cpu")},
        ]
        results = []
        for options in ways:
            L.seed_everything(11, verbose=False)
            module = Net() if precision == "bf16-mixed" else Overflows()
            own = L.Trainer(
                strategy=ReplicaZeroStrategy(),
                devices=case.devices,
                max_epochs=1,
                logger=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                enable_checkpointing=False,
                **options,
            )
            own.fit(module)
            results.append(({k: v.tolist() for k, v in module.state_dict().items()}, own.precision_plugin.state_dict()))
        torch.save(results, out / f"{precision}.{own.global_rank}.pt")


@no_gpu
def test_it_trains_as_with_the_right_plugin(tmp_path: Path) -> None:
    outcome = world.run(Case(devices=2), tmp_path, target=train)
    assert outcome.code == 0, outcome.logs
    for rank in range(2):
        (weights, _), (expected, _) = torch.load(tmp_path / f"bf16-mixed.{rank}.pt")
        assert weights == expected
        (weights, scaler), (expected, expected_scaler) = torch.load(tmp_path / f"16-mixed.{rank}.pt")
        assert weights == expected
        assert scaler == expected_scaler
        assert scaler["scale"] < 2.0**16  # it has met infinities
