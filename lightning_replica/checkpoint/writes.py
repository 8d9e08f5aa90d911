"""What one rank writes, and the description of it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_replica.checkpoint.chunks import Chunk
from lightning_replica.checkpoint.contents import (
    Contents,
    OptimizerInfo,
    StateInfo,
    TensorInfo,
    dtype_name,
    main_key,
    state_key,
    weight_key,
)
from lightning_replica.errors import CheckpointError
from lightning_replica.sharding.optimizer import Piece, ShardedOptimizer, is_like
from lightning_replica.sharding.state import ShardedState


def group_names(state: ShardedState, names: Sequence[str]) -> list[list[list[str]]]:
    """The names of the parameters in each param group of each optimizer."""
    return [
        [[names[sharded.position(p)] for p in group["params"]] for group in sharded.optimizer.param_groups]
        for sharded in state.optimizers
    ]


def weights_of(state: ShardedState, names: Sequence[str], extra_tensors: Mapping[str, Tensor]) -> dict[str, TensorInfo]:
    """Describes all weights: those that are trained, then the others."""
    trained = {order: p for each in state.buffers for order, p in zip(each.order, each.parameters, strict=True)}
    weights = {names[order]: TensorInfo.of(trained[order]) for order in sorted(trained)}
    for name, tensor in extra_tensors.items():
        if name in weights:
            raise CheckpointError(
                f"{name} is trained, and so already part of the checkpoint: leave it out of the extras."
            )
        weights[name] = TensorInfo.of(tensor.detach().contiguous())
    missing = [name for name in names if name not in weights]
    if missing:
        raise CheckpointError(f"{', '.join(missing[:3])}: neither trained nor among the extra tensors.")
    return weights


@dataclass
class Writes:
    """One rank's part.

    Attributes:
        chunks: The tensors that it writes.
        state: For every optimizer, the state of those parameters whose first element it writes.
    """

    chunks: list[Chunk] = field(default_factory=list)
    state: list[dict[str, StateInfo]] = field(default_factory=list)

    def add_pieces(self, state: ShardedState, names: Sequence[str], ranks: Collection[int]) -> None:
        """Adds everything in the pieces of ``ranks``: values, main parameters, optimizer state."""
        for number, sharded in enumerate(state.optimizers):
            self.state.append({})
            for piece in sharded.pieces:
                if piece.where.rank in ranks:
                    self._add_values(piece, names)
                    self._add_state(number, sharded, piece, names)

    def add_extras(self, extra_tensors: Mapping[str, Tensor], rank: int, ranks: int) -> None:
        """Adds this rank's share of what all ranks have."""
        for tensor_name in list(extra_tensors)[rank::ranks]:
            tensor = extra_tensors[tensor_name].detach()
            self._add(weight_key(tensor_name), tensor.numel(), 0, tensor.reshape(-1))

    def _add_values(self, piece: Piece, names: Sequence[str]) -> None:
        buffers, where = piece.buffers, piece.where
        name, numel = names[buffers.order[where.parameter]], piece.whole.numel()
        self._add(weight_key(name), numel, where.param.start, buffers.params[where.world.start : where.world.stop])
        if buffers.main.dtype != buffers.params.dtype:
            self._add(main_key(name), numel, where.param.start, buffers.main[where.local.start : where.local.stop])

    def _add_state(self, number: int, sharded: ShardedOptimizer, piece: Piece, names: Sequence[str]) -> None:
        name, start = names[piece.buffers.order[piece.where.parameter]], piece.where.param.start
        if piece.parameter not in sharded.optimizer.state:
            return
        info = StateInfo()
        for key, value in sharded.optimizer.state[piece.parameter].items():
            stored = state_key(number, name, key)
            if is_like(key, value, piece.parameter):
                self._add(stored, piece.whole.numel(), start, _in_order(value, piece.parameter))
                info.like[key] = dtype_name(value.dtype)
            elif start == 0 and isinstance(value, Tensor) and value.ndim > 0:
                self._add(stored, value.numel(), 0, value.detach().reshape(-1))
                info.whole[key] = TensorInfo.of(value.detach().contiguous())
            elif start == 0:
                info.plain[key] = value
        if start == 0:
            self.state[number][name] = info

    def _add(self, name: str, numel: int, start: int, data: Tensor) -> None:
        if data.numel():
            self.chunks.append(Chunk(name, numel, start, data))


def describe(
    state: ShardedState,
    weights: dict[str, TensorInfo],
    aliases: Mapping[str, str],
    names: Sequence[str],
    described: Sequence[Sequence[dict[str, StateInfo]]],
) -> Contents:
    """Puts together what the ranks have described.

    Args:
        state: The sharded state.
        weights: As `weights_of` gives them.
        aliases: Further names.
        names: Of all parameters, in registration order.
        described: The `Writes.state` of each rank.
    """
    optimizers = []
    for number, (sharded, groups) in enumerate(zip(state.optimizers, group_names(state, names), strict=True)):
        merged = {name: info for each in described for name, info in each[number].items()}
        hyperparameters: list[dict[str, Any]] = [
            {**group, "params": params} for group, params in zip(sharded.optimizer.param_groups, groups, strict=True)
        ]
        optimizers.append(OptimizerInfo(type(sharded.optimizer).__name__, hyperparameters, merged))
    main = {
        names[order]: dtype_name(buffers.main.dtype)
        for buffers in state.buffers
        for order in buffers.order
        if buffers.main.dtype != buffers.params.dtype
    }
    return Contents(weights, dict(aliases), main, optimizers)


def _in_order(value: Tensor, parameter: Tensor) -> Tensor:
    """(numel,) the elements of ``value`` in the order in which those of ``parameter``, of its shape, lie in memory."""
    value = value.detach()
    if value.stride() != parameter.stride():
        value = torch.empty_like(parameter, dtype=value.dtype).copy_(value).detach()
    return value.as_strided((value.numel(),), (1,), value.storage_offset())
