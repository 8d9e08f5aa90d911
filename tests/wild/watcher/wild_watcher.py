"""Watches a training whose code is not ours: Lightning itself adds this callback, found through an entry point.

Each rank leaves two files in ``WILD_OUT``. ``progress<rank>`` has a line for every place that training passes, so
that somebody outside knows when to kill. ``evidence<rank>.jsonl`` has a line for every stage that has ended: what came
of it.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING or "pytorch_lightning" not in sys.modules:
    import lightning as L
    from lightning.pytorch.callbacks import Callback
else:
    import pytorch_lightning as L
    from pytorch_lightning.callbacks import Callback

OUT = Path(os.environ.get("WILD_OUT", "."))


def _append(path: Path, line: str) -> None:
    """Append a line to a file, in a way that is not taken for the training's own."""
    path.touch()
    with path.open("r+") as file:
        file.seek(0, os.SEEK_END)
        file.write(line)


class Watcher(Callback):
    """Writes down where training is, and what it ends with. It has no state."""

    def _pass(self, trainer: L.Trainer, place: str) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            line = f"{time.monotonic()} {os.getpid()} {_setups} {place} {trainer.global_step}\n"
            _append(OUT / f"progress{trainer.global_rank}", line)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        global _setups
        _setups += 1

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._pass(trainer, "batch")

    def on_validation_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._pass(trainer, "validation")

    def on_save_checkpoint(self, trainer: L.Trainer, *_: Any) -> None:
        self._pass(trainer, "save")

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._pass(trainer, "epoch")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        evidence = {
            "stage": stage,
            "weights": {name: _digest(tensor) for name, tensor in pl_module.state_dict().items()},
            "metrics": {name: float(value).hex() for name, value in trainer.callback_metrics.items()},
            "progress": [trainer.global_step, trainer.current_epoch],
        }
        _append(OUT / f"evidence{trainer.global_rank}.jsonl", json.dumps(evidence) + "\n")


_setups = 0


def _digest(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    tensor = value.detach().cpu().contiguous()
    return f"{tensor.dtype} {hashlib.sha256(tensor.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]}"


def callbacks() -> list[Callback]:
    """What the entry point names. Lightning calls it for every `Trainer`."""
    return [Watcher()] if "WILD_OUT" in os.environ else []
