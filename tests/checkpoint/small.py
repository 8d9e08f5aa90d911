"""Checkpoints of one rank, in this process: what they hold is one number, and they take milliseconds."""

import functools
from collections import OrderedDict
from typing import TypeVar

import torch
from torch import Tensor, nn

from lightning_replica.checkpoint.directory import CheckpointDirectory
from lightning_replica.checkpoint.location import Given, Location
from lightning_replica.checkpoint.manifest import Provenance
from lightning_replica.core.grid import Grid
from tests.checkpoint.job import Run

P = TypeVar("P", bound=Location)


@functools.cache
def _run() -> Run:
    net = nn.Sequential(OrderedDict(first=nn.Linear(20, 7)))
    net.register_buffer("seen", torch.zeros(3))
    return Run("SGD", 0, Grid.of(1, 1), "element", net=net, bucket_bytes=4000)


def _state() -> list[dict[str, Tensor]]:
    (sharded,) = _run().state.optimizers
    return [sharded.optimizer.state[piece.parameter] for piece in sharded.pieces]


def _weights() -> list[Tensor]:
    net = _run().net
    return [each.detach() for each in (*net.parameters(), *net.buffers())]


def _fill(value: float) -> None:
    for tensor in _weights():
        tensor.fill_(value)
    for state, piece in zip(_state(), _run().state.optimizers[0].pieces, strict=True):
        state["momentum_buffer"] = torch.full_like(piece.parameter, value, requires_grad=False)


def save(path: P, step: int | None, value: float, written_for: str = "periodic") -> P:
    """Publishes a checkpoint whose every element, of weights and optimizer state, is ``value``."""
    _fill(value)
    _run().save(path, provenance=Provenance(step, written_for))
    return path


def load(path: Location | None) -> float:
    """The number in a checkpoint; it must be everywhere."""
    assert path is not None
    _fill(-1.0)
    _run().load(path)
    found = [*_weights(), *(state["momentum_buffer"] for state in _state())]
    values = {value for tensor in found for value in tensor.reshape(-1).tolist()}
    assert len(values) == 1, values
    return float(values.pop())


def directory_of(path: Given, *steps: int) -> CheckpointDirectory:
    """A directory with a checkpoint for each of ``steps``, which holds its number; the tracker names the last."""
    directory = CheckpointDirectory(path)
    directory.prepare()
    for step in steps:
        directory.track(save(directory.path_of(step), step, step).name)
    return directory
