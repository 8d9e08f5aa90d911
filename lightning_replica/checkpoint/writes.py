"""What one rank writes, and the description of what all ranks write."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_replica._compat.dtensor import local_of
from lightning_replica.checkpoint.boxes import Whole
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
from lightning_replica.sharding.engine import Checkpointable, HeldPiece


def group_names(state: Checkpointable, names: Sequence[str]) -> list[list[list[str]]]:
    """Return the names of the parameters in each param group of each optimizer."""
    return [
        [[names[sharded.position(p)] for p in group["params"]] for group in sharded.optimizer.param_groups]
        for sharded in state.optimizers
    ]


def weights_of(
    state: Checkpointable, names: Sequence[str], extra_tensors: Mapping[str, Tensor]
) -> dict[str, TensorInfo]:
    """Describe all weights: first the trained parameters, then the extra tensors.

    Raises:
        CheckpointError: If a tensor is both trained and extra, or a parameter is neither.
    """
    trained = {order: whole for sharded in state.optimizers for order, whole in sharded.wholes().items()}
    weights = {names[order]: TensorInfo.of(trained[order]) for order in sorted(trained)}
    for name, tensor in extra_tensors.items():
        if name in weights:
            raise CheckpointError(
                f"{name} is trained, so it is already part of the checkpoint: leave it out of the extras."
            )
        weights[name] = TensorInfo.of(tensor.detach().contiguous())
    missing = [name for name in names if name not in weights]
    if missing:
        raise CheckpointError(f"{', '.join(missing[:3])}: neither trained nor among the extra tensors.")
    return weights


@dataclass
class Writes:
    """One rank's part of a checkpoint.

    Attributes:
        chunks: The tensors that the rank writes.
        state: For every optimizer, the state of the parameters whose first element the rank writes.
    """

    chunks: list[Chunk] = field(default_factory=list)
    state: list[dict[str, StateInfo]] = field(default_factory=list)

    def add_pieces(self, state: Checkpointable, names: Sequence[str], ranks: Collection[int]) -> None:
        """Add everything in the pieces of ``ranks``: values, main parameters, optimizer state."""
        for number, sharded in enumerate(state.optimizers):
            self.state.append({})
            for piece in sharded.pieces:
                if piece.rank in ranks:
                    self._add_values(piece, names[piece.order])
                    self._add_state(number, piece, names[piece.order])

    def add_extras(self, extra_tensors: Mapping[str, Tensor], rank: int, ranks: int) -> None:
        """Add every ``ranks``-th of the extra tensors, from ``rank`` on: all ranks have the same extra tensors."""
        for tensor_name in list(extra_tensors)[rank::ranks]:
            tensor = extra_tensors[tensor_name].detach()
            self._add(weight_key(tensor_name), tensor.numel(), 0, tensor.reshape(-1))

    def _add_values(self, piece: HeldPiece, name: str) -> None:
        numel = local_of(piece.whole).numel()
        self._add(weight_key(name), numel, piece.start, piece.value)
        if piece.main is not None:
            self._add(main_key(name), numel, piece.start, piece.main)

    def _add_state(self, number: int, piece: HeldPiece, name: str) -> None:
        state, start = piece.state, piece.start
        if state is None:
            return
        info = StateInfo()
        for key, value in state.items():
            stored = state_key(number, name, key)
            if piece.is_like(key, value):
                self._add(stored, local_of(piece.whole).numel(), start, _in_order(value, piece.parameter))
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
    state: Checkpointable,
    weights: dict[str, TensorInfo],
    aliases: Mapping[str, str],
    names: Sequence[str],
    described: Sequence[Sequence[dict[str, StateInfo]]],
    whole: Whole,
) -> Contents:
    """Merge the descriptions of all ranks into the contents of the checkpoint.

    Args:
        state: The sharded state.
        weights: What `weights_of` returned.
        aliases: For every further name of a parameter or buffer, its first.
        names: Name of every parameter, in registration order.
        described: The `Writes.state` of each rank.
        whole: Where the rank's tensors lie in the whole model.
    """
    optimizers = []
    for number, (sharded, groups) in enumerate(zip(state.optimizers, group_names(state, names), strict=True)):
        merged = {name: info for each in described for name, info in each[number].items()}
        hyperparameters: list[dict[str, Any]] = [
            {**group, "params": params} for group, params in zip(sharded.optimizer.param_groups, groups, strict=True)
        ]
        optimizers.append(OptimizerInfo(type(sharded.optimizer).__name__, hyperparameters, merged))
    main = {
        names[order]: dtype_name(dtype)
        for sharded in state.optimizers
        for order, dtype in sharded.main_dtypes().items()
    }
    boxes = {name: list(each) for name, each in whole.boxes.items()}
    return Contents(weights, dict(aliases), main, optimizers, boxes, list(whole.objects))


def _in_order(value: Tensor, parameter: Tensor) -> Tensor:
    """Return the elements of ``value`` as (numel,), in the order in which ``parameter``'s elements lie in memory.

    Both have the same shape.
    """
    value = value.detach()
    if value.stride() != parameter.stride():
        value = torch.empty_like(parameter, dtype=value.dtype).copy_(value).detach()
    return value.as_strided((value.numel(),), (1,), value.storage_offset())
