"""Optimizer state of whole parameters, in torch's own format, which DDP writes and reads.

Only the first replica gathers: its S ranks together hold everything. Rank 0 gets the whole state.
"""

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_replica.core import plain
from lightning_replica.core.exchange import all_gather_bytes
from lightning_replica.core.pending_work import Check, finish
from lightning_replica.errors import ConfigurationError
from lightning_replica.groups.membership import Groups
from lightning_replica.sharding.gathering import gather
from lightning_replica.sharding.optimizer import ELEMENT_WISE, ShardedOptimizer
from lightning_replica.sharding.piece import Piece
from lightning_replica.sharding.values import Values


@dataclass(frozen=True)
class WholeOptimizer:
    """The state of one optimizer, for whole parameters.

    Attributes:
        state_dict: The state, as ``torch.optim.Optimizer.state_dict`` returns it.
        main: Main parameters by position in the param groups, where they have more bits than the parameters.
    """

    state_dict: dict[str, Any] = field(default_factory=dict)
    main: dict[int, Tensor] = field(default_factory=dict)


def gather_optimizer(optimizer: ShardedOptimizer[Any], groups: Groups, check: Check, place: int = 0) -> WholeOptimizer:
    """Collect an optimizer's state. Collective over the replica of ``place``; other ranks need not call it.

    Args:
        optimizer: The optimizer.
        groups: The process groups.
        check: Raises when waiting has become pointless.
        place: The place in the grid of the rank that gets it.

    Returns:
        The whole state on that rank, an empty one on the other ranks.
    """
    if place not in groups.grid.replica_places(groups.rank):
        return WholeOptimizer()
    described = _share(_describe(optimizer), groups, check)
    positions = _positions(optimizer)
    state: dict[int, dict[str, Any]] = {}
    main: dict[int, Tensor] = {}
    for buffers in optimizer.buffers:
        entries = {index: described[order] for index, order in enumerate(buffers.order) if order in described}
        for key, dtype in _kinds(entries):
            flat = _gather_flat(optimizer, buffers, dtype, partial(_entry, key))
            _collect(flat, groups, buffers, check)
            for index in (index for index, entry in entries.items() if entry.get(key) == dtype):
                position = positions[id(buffers.parameters[index])]
                state.setdefault(position, {})[key] = _own_copy(buffers.whole(index, flat))
        for index, entry in entries.items():
            numbers = {key: value for key, value in entry.items() if not isinstance(value, torch.dtype)}
            state.setdefault(positions[id(buffers.parameters[index])], {}).update(numbers)
        if buffers.main.dtype != buffers.params.dtype:
            flat = _gather_flat(optimizer, buffers, buffers.main.dtype, lambda piece: piece.parameter.detach())
            _collect(flat, groups, buffers, check)
            for index, parameter in enumerate(buffers.parameters):
                main[positions[id(parameter)]] = _own_copy(buffers.whole(index, flat))
    if groups.place != place:
        return WholeOptimizer()
    return WholeOptimizer({"state": state, "param_groups": _param_groups(optimizer)}, main)


def load_optimizer(
    optimizer: ShardedOptimizer[Any], saved: Mapping[str, Any], main: Mapping[int, Tensor] | None = None
) -> None:
    """Load this rank's part of a state that `gather_optimizer`, or any unsharded optimizer, has written.

    The parameters must already hold the checkpoint's weights. Main parameters are used where they round to
    these weights.

    Args:
        optimizer: The optimizer.
        saved: The state, as ``torch.optim.Optimizer.state_dict`` returns it.
        main: Main parameters by position in the param groups.

    Raises:
        ConfigurationError: If ``saved`` holds no optimizer state, or that of other parameters.
    """
    _check_groups(optimizer, saved)
    positions = _positions(optimizer)
    state: dict[int, dict[str, Any]] = {}
    for number, piece in enumerate(optimizer.pieces):
        position = positions[id(piece.whole)]
        entry = saved["state"].get(position)
        if entry is not None:
            state[number] = {key: piece.cut(key, value) for key, value in entry.items()}
        if main and position in main:
            piece.parameter.data.copy_(piece.buffers.split(piece.where, main[position]))
    optimizer.load_state(state, saved["param_groups"])
    for buffers in optimizer.buffers:
        buffers.main_from_params()


def _describe(optimizer: ShardedOptimizer[Any]) -> dict[int, dict[str, Any]]:
    """Describe this rank's state of each parameter: the dtype of an entry that must be gathered, else the value."""
    described: dict[int, dict[str, Any]] = {}
    for piece in optimizer.pieces:
        order = piece.buffers.order[piece.where.parameter]
        for key, value in (piece.state or {}).items():
            described.setdefault(order, {})[key] = value.dtype if piece.is_like(key, value) else value
    return described


def _share(own: dict[int, dict[str, Any]], groups: Groups, check: Check) -> dict[int, dict[str, Any]]:
    """Merge what the ranks of the replica have described."""
    merged: dict[int, dict[str, Any]] = {}
    for payload in all_gather_bytes(_to_bytes(own), groups.replica, check):
        for order, entry in plain.load(payload).items():
            merged.setdefault(order, {}).update(entry)
    return merged


def _to_bytes(described: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(described, buffer)
    return buffer.getvalue()


def _kinds(entries: Mapping[int, Mapping[str, Any]]) -> list[tuple[str, torch.dtype]]:
    found = {(key, v) for entry in entries.values() for key, v in entry.items() if isinstance(v, torch.dtype)}
    return sorted(found, key=str)


def _entry(key: str, piece: Piece) -> Tensor | None:
    value = (piece.state or {}).get(key)
    return value if isinstance(value, Tensor) else None


def _gather_flat(
    optimizer: ShardedOptimizer[Any], buffers: Values, dtype: torch.dtype, value_of: Callable[[Piece], Tensor | None]
) -> Tensor:
    """Return a flat tensor laid out as ``buffers.params``, with the pieces of the own shard filled in."""
    flat = torch.zeros(buffers.layout.world_numel, dtype=dtype, device=buffers.params.device)
    for piece in optimizer.pieces:
        value = value_of(piece) if piece.buffers is buffers else None
        if value is not None and value.dtype == dtype:
            buffers.world_piece(piece.where, flat).copy_(value)
    return flat


def _collect(flat: Tensor, groups: Groups, buffers: Values, check: Check) -> None:
    gather([(bucket, flat) for bucket in buffers.layout.buckets], groups, check)
    finish(check)  # values must be complete before they are written to a file


def _own_copy(view: Tensor) -> Tensor:
    return view.clone(memory_format=torch.preserve_format)


def _positions(optimizer: ShardedOptimizer[Any]) -> dict[int, int]:
    """Return the position of every parameter, by id, in the joined param groups: torch's parameter ids."""
    listed: list[nn.Parameter] = [p for group in optimizer.optimizer.param_groups for p in group["params"]]
    return {id(parameter): position for position, parameter in enumerate(listed)}


def _param_groups(optimizer: ShardedOptimizer[Any]) -> list[dict[str, Any]]:
    positions = _positions(optimizer)
    return [
        {**group, "params": [positions[id(parameter)] for parameter in group["params"]]}
        for group in optimizer.optimizer.param_groups
    ]


def _check_groups(optimizer: ShardedOptimizer[Any], saved: Mapping[str, Any]) -> None:
    name = type(optimizer.optimizer).__name__
    if "state" not in saved or "param_groups" not in saved:
        raise ConfigurationError(
            f"The checkpoint holds no state for the optimizer {name}, only {sorted(saved)}. It was written with"
            " `save_weights_only=True` or by a strategy that leaves optimizer state out; load its weights instead."
        )
    sizes = [len(group["params"]) for group in optimizer.optimizer.param_groups]
    given = [len(group["params"]) for group in saved["param_groups"]]
    if sizes != given:
        raise ConfigurationError(
            f"The checkpoint's optimizer has param groups of {given} parameters, but this model's {name} has {sizes}."
            " It was written for another model, or for another `configure_optimizers`."
        )
    if not isinstance(optimizer.optimizer, ELEMENT_WISE):
        return
    positions = _positions(optimizer)
    for parameter in (p for buffers in optimizer.buffers for p in buffers.parameters):
        position = positions[id(parameter)]
        for key, value in saved["state"].get(position, {}).items():
            if isinstance(value, Tensor) and value.ndim > 0 and value.shape != parameter.shape:
                raise ConfigurationError(
                    f"The checkpoint's {name} state {key!r} of parameter {position} has shape {tuple(value.shape)}, but"
                    f" the parameter has {tuple(parameter.shape)}. It was written for another model."
                )
