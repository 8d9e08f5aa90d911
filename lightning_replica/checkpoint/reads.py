"""What one rank reads: its own parts, no matter which rank wrote them."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_replica._compat.dtensor import local_of
from lightning_replica.checkpoint.chunks import Chunk, ChunkReader
from lightning_replica.checkpoint.contents import (
    Contents,
    TensorInfo,
    main_key,
    named_dtype,
    state_key,
    weight_key,
)
from lightning_replica.sharding.engine import Checkpointable, HeldPiece, OptimizerShard


class Reads:
    """A list of what one rank reads, and of what to do with it after reading.

    Elements are read in place if they lie in memory in the same order as when they were written. If they do not (other
    strides), the whole tensor is read, and the needed elements are copied out of it.

    Args:
        contents: What the checkpoint holds.
        reader: Reads it.
    """

    def __init__(self, contents: Contents, reader: ChunkReader) -> None:
        self._contents, self._reader = contents, reader
        self._chunks: list[Chunk] = []
        self._wholes: dict[str, Tensor] = {}
        self._afterwards: list[Callable[[], object]] = []

    def run(self) -> None:
        """Read everything that was added."""
        self._reader.read(self._chunks)
        for action in self._afterwards:
            action()

    def whole(self, key: str, info: TensorInfo) -> Tensor:
        """Return a whole tensor in its own memory. It is read once, by `run`, however often it is asked for."""
        if key not in self._wholes:
            flat = info.empty()
            self._wholes[key] = info.view(flat)
            self._read(key, info.numel, 0, flat)
        return self._wholes[key]

    def values(self, state: Checkpointable, names: Sequence[str]) -> None:
        """Add all parameters, whole, and the main parameters of the shard.

        A main parameter that the checkpoint does not have is computed from the parameter.
        """
        for sharded in state.optimizers:
            sharded.forget_main()
            for order, whole in sharded.wholes().items():
                self.tensor(names[order], whole)
            for piece in sharded.pieces:
                name = names[piece.order]
                if name in self._contents.main:
                    self._piece(main_key(name), name, piece, piece.parameter.detach())
            self._afterwards.append(sharded.main_from_params)

    def extras(self, extra_tensors: Mapping[str, Tensor]) -> None:
        """Add all other weights."""
        for name, tensor in extra_tensors.items():
            self.tensor(name, tensor.detach())

    def tensor(self, name: str, target: Tensor) -> None:
        """Add one whole parameter or buffer, to be read into ``target``."""
        key, info = weight_key(name), self._contents.weights[name]
        if info.same_order(target):
            self._read(key, info.numel, 0, _flat(target))
        else:
            whole = self.whole(key, info)
            self._afterwards.append(lambda: target.copy_(whole))

    def state(self, number: int, sharded: OptimizerShard, names: Sequence[str]) -> dict[int, dict[str, Any]]:
        """Add an optimizer's state and return it, by number of the piece. Complete only after `run`."""
        found: dict[int, dict[str, Any]] = {}
        for place, piece in enumerate(sharded.pieces):
            name = names[piece.order]
            info = self._contents.optimizers[number].state.get(name)
            if info is None:
                continue
            found[place] = copy.deepcopy(info.plain)
            for key, dtype in info.like.items():
                target = torch.empty_like(piece.parameter, dtype=named_dtype(dtype), requires_grad=False)
                self._piece(state_key(number, name, key), name, piece, target)
                found[place][key] = target
            for key, whole in info.whole.items():
                found[place][key] = self.whole(state_key(number, name, key), whole)
        return found

    def groups(self, state: Checkpointable) -> list[list[dict[str, Any]]]:
        """Return the hyperparameters of the param groups of each optimizer."""
        return [each.groups for each in self._contents.optimizers]

    def _piece(self, key: str, name: str, piece: HeldPiece, target: Tensor) -> None:
        """Add the part of a parameter-like tensor that belongs to ``piece``."""
        weight = self._contents.weights[name]
        if weight.same_order(local_of(piece.whole)):
            self._read(key, weight.numel, piece.start, _flat(target))
        else:
            whole = self.whole(key, TensorInfo(str(target.dtype).removeprefix("torch."), weight.shape, weight.stride))
            self._afterwards.append(lambda: target.copy_(piece.split(whole)))

    def _read(self, key: str, numel: int, start: int, target: Tensor) -> None:
        if target.numel():
            self._chunks.append(Chunk(key, numel, start, target))


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor without holes as (numel,), in the order in which they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
