"""`Fingerprint`: hashes of what a training has seen and of its results, to be compared with those of another run."""

import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from lightning_replica._compat.dtensor import local_of
from lightning_replica._compat.lightning_names import pl
from lightning_replica.core import checks
from lightning_replica.core.lines import append
from lightning_replica.state.objects.contents import is_content, plain_of
from lightning_replica.state.objects.signature import digest_of
from lightning_replica.state.reachable import signature_of_all
from lightning_replica.trainer.strategy import replica_strategy

_ATOMS: Final = (bool, int, float, complex, str, bytes)
_HASHED: Final = (*_ATOMS, Tensor, np.ndarray)


def digest(*values: Any) -> str:
    """Return 32 hexadecimal digits of SHA-256 over every bit of tensors, arrays, numbers, strings and their containers.

    Of any other object, its class and all that it leads to is hashed.
    """
    sha = hashlib.sha256()
    for value in values:
        _feed(sha, value)
    return sha.hexdigest()[:32]


def _feed(sha: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        value = plain_of(value) if is_content(value) else value.detach()  # not by a method of its class
        sha.update(f"tensor {value.dtype} {tuple(value.shape)}".encode())
        dense = value.to_dense() if value.layout != torch.strided else value
        sha.update(dense.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, np.ndarray) and value.dtype != object:
        sha.update(f"array {value.dtype} {value.shape}".encode())
        sha.update(value.tobytes())
    elif isinstance(value, Mapping):
        sha.update(f"mapping {len(value)}".encode())
        for key in value:
            _feed(sha, key)
            _feed(sha, value[key])
    elif isinstance(value, (list, tuple)):
        sha.update(f"list {len(value)}".encode())
        for item in value:
            _feed(sha, item)
    elif value is None or isinstance(value, _ATOMS):
        sha.update(f"{type(value).__name__} {value!r};".encode())
    else:
        sha.update(f"object {type(value).__qualname__} {digest_of(value)};".encode())


def _numbers_in(state: Any) -> Any:
    """Return a state with the names of their classes in place of objects, which may lead to all of the trainer."""
    if isinstance(state, Mapping):
        return {key: _numbers_in(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [_numbers_in(item) for item in state]
    return state if state is None or isinstance(state, _HASHED) else type(state).__qualname__


class Fingerprint(pl.Callback):
    """Writes hashes of the batches that each rank sees, and of its state after each step and at the end.

    Every rank appends lines of JSON to ``<folder>/rank<n>.jsonl``; a replacement continues the file of the lost rank.
    `compare.read` of `lightning_replica.chaos` reads them.

    | line | keys |
    |---|---|
    | of a fit | fit, world, pid, time |
    | of a batch | fit, batch: [epoch, number], data |
    | of a step | fit, step, weights (and buffers), shard, optimizer, random |
    | of the end | fit, end, and those of a step, schedulers, metrics, progress |
    | of objects | fit, at: the step, or "end", objects: a digest of each attribute by name |

    Args:
        folder: Folder of these files; it is created if it does not exist.
        every_n_steps: Steps between hashes of the state; each hash reads the whole state.
        objects: Whether there are lines of all that modules, callbacks and the data module lead to.
    """

    def __init__(self, folder: str | os.PathLike[str], every_n_steps: int = 1, objects: bool = False) -> None:
        checks.whole(1, every_n_steps=every_n_steps)
        self._folder, self._every, self._objects = Path(folder), every_n_steps, objects
        self._fit = -1
        self._begun = (-1, -1, -1)  # the newest batch, by epoch and number, and the updates applied before it

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Write the first line of a new fit.

        Raises:
            ConfigurationError: If the trainer has another strategy.
        """
        if stage != "fit":
            return
        replica_strategy(trainer, self)
        self._fit += 1
        self._begun = (-1, -1, -1)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._write(trainer, {"world": trainer.world_size, "pid": os.getpid(), "time": time.time()})

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Write a hash of the batch."""
        self._begun = (trainer.current_epoch, batch_idx, replica_strategy(trainer, self).state.step)
        self._write(trainer, {"batch": [trainer.current_epoch, batch_idx], "data": digest(batch)})

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Write the state if a step was made: always so if the tail of a batch before the newest is done again."""
        step = replica_strategy(trainer, self).state.step
        if self._begun != (trainer.current_epoch, batch_idx, step) and step % self._every == 0:
            self._write(trainer, {"step": step, **self._state(trainer)})
            self._write_objects(trainer, step)

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Write the state at the end of the fit."""
        end = {
            "schedulers": digest(
                [_numbers_in(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs]
            ),
            "metrics": digest({name: trainer.callback_metrics[name] for name in sorted(trainer.callback_metrics)}),
            "progress": [trainer.global_step, trainer.current_epoch],
        }
        self._write(trainer, {"end": replica_strategy(trainer, self).state.step, **self._state(trainer), **end})
        self._write_objects(trainer, "end")

    def _write_objects(self, trainer: pl.Trainer, at: int | str) -> None:
        if self._objects:
            self._write(trainer, {"at": at, "objects": signature_of_all(trainer)})

    def _state(self, trainer: pl.Trainer) -> dict[str, str]:
        strategy = replica_strategy(trainer, self)
        module = trainer.lightning_module
        tensors: Iterable[Tensor] = (*module.parameters(), *module.buffers())
        return {
            "weights": digest(*map(local_of, tensors)),
            "shard": digest(*[tensor for name, tensor in strategy.state.shard() if name == "main"]),
            "optimizer": digest(*[piece.state for sharded in strategy.state.optimizers for piece in sharded.pieces]),
            "random": digest(strategy.session.world.device.rng_state()),
        }

    def _write(self, trainer: pl.Trainer, record: dict[str, Any]) -> None:
        append(self._folder / f"rank{trainer.global_rank}.jsonl", json.dumps({"fit": self._fit, **record}) + "\n")
