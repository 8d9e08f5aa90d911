"""The training of tests/chaos/zoo.py in the ranks of a fault: state of every kind, with the guard as by default."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch

from lightning_replica.callbacks import DyingGaspCheckpoint
from tests.chaos.zoo import Module, Shadow, Zoo
from tests.support import job
from tests.support.accelerators import accelerator
from tests.support.job import Case, Faults
from tests.support.trainers import state_of


class FaultyZoo(Zoo):
    """Reaches the points of user code between the changes of its state."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self._faults = [faults]

    def numbers(self) -> Iterator[Any]:
        for place, number in enumerate(super().numbers()):
            if place == 10:
                self._faults[0].reach("forward", self.trainer.global_step)
            yield number

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output, step = super().training_step(batch, batch_idx), self.trainer.global_step
        output["loss"].register_hook(lambda _: self._faults[0].reach("backward", step))
        return output

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._faults[0].reach("before_optimizer_step", self.trainer.global_step)


def run(case: Case, out: Path) -> None:
    """Trains in one rank and writes down what came of it."""
    torch.set_num_threads(1)
    L.seed_everything(3, verbose=False)
    faults, shadow, data = Faults(case, out), Shadow(), Module()
    module = FaultyZoo(faults)
    strategy = job.strategy_with_default_guard(case)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator=accelerator(),
        devices=case.devices,
        max_epochs=case.epochs,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
        callbacks=[
            shadow,
            faults,
            *([DyingGaspCheckpoint(out / "gasp", case.grace_s)] if case.gasp else ()),
        ],
    )
    trainer.fit(module, datamodule=data, ckpt_path=case.load or None)
    result = {
        "weights": job._digest(*module.parameters(), *module.buffers()),
        "optimizer": job.digest_of_optimizers(state_of(strategy)),
        "random": [job._digest(torch.get_rng_state()), repr(random.getstate()), repr(np.random.get_state())],
        "numbers": [float(number) for number in module.numbers()],
        "callback": [shadow.n, shadow.losses, shadow.best, job._digest(*shadow.shadow)],
        "data": [data.seen, repr(data.numbers)],
        "progress": [trainer.global_step, trainer.current_epoch],
    }
    (out / f"rank{trainer.global_rank}.json").write_text(json.dumps(result))
