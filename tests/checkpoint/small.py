"""Checkpoints of one rank, in this process: what they hold is one number, and they take milliseconds."""

from pathlib import Path
from typing import Any

import torch

from lightning_replica.checkpoint.directory import CheckpointDirectory
from lightning_replica.grid import Grid
from tests.checkpoint.job import Run


def new_run(value: float) -> Run:
    """A training whose every element, of weights and optimizer state, is ``value``."""
    run = Run("SGD", 0, Grid(1, 1), "element")
    for tensor in [*run.net.parameters(), *(b for b in run.net.buffers() if b.is_floating_point())]:
        tensor.detach().fill_(value)
    for sharded in run.state.optimizers:
        for piece in sharded.pieces:
            sharded.optimizer.state[piece.parameter]["momentum_buffer"] = torch.full_like(piece.parameter, value)
    return run


def save(path: Path, step: int | None, value: float, **more: Any) -> Path:
    """Publishes a checkpoint that holds ``value``."""
    run = new_run(value)
    run.save(path, step=step, **more)
    run.close()
    return path


def load(path: Path | None) -> float:
    """The number in a checkpoint; it must be everywhere."""
    assert path is not None
    run = new_run(-1.0)
    run.load(path)
    found = [*run.net.parameters(), *(b for b in run.net.buffers() if b.is_floating_point())]
    found += [
        state["momentum_buffer"] for sharded in run.state.optimizers for state in sharded.optimizer.state.values()
    ]
    values = {value for tensor in found for value in tensor.detach().reshape(-1).tolist()}
    run.close()
    assert len(values) == 1, values
    return float(values.pop())


def directory_of(path: Path, *steps: int) -> CheckpointDirectory:
    """A directory with a checkpoint for each of ``steps``, which holds its number; the tracker names the last."""
    directory = CheckpointDirectory(path)
    directory.prepare()
    for step in steps:
        directory.track(save(directory.path_of(step), step, step).name)
    return directory
