"""What one rank reads: its own parts, whoever wrote them."""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_replica.checkpoint.chunks import Chunk, read_chunks
from lightning_replica.checkpoint.contents import (
    Contents,
    TensorInfo,
    main_key,
    named_dtype,
    state_key,
    weight_key,
)
from lightning_replica.checkpoint.files import Readable
from lightning_replica.sharding.optimizer import Piece, ShardedOptimizer
from lightning_replica.sharding.state import ShardedState


class Reads:
    """Collects what to read, and what to do with it once it is there.

    Elements are read into place wherever they lie in the same order in memory as when they were written. Where they do
    not (other strides), the whole tensor is read, and what is needed is copied out of it.

    Args:
        contents: What the checkpoint holds.
    """

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._chunks: list[Chunk] = []
        self._wholes: dict[str, Tensor] = {}
        self._afterwards: list[Callable[[], object]] = []

    def run(self, directory: Readable, files: Collection[str]) -> None:
        """Reads everything from ``directory``, out of no other than ``files``."""
        read_chunks(directory, self._chunks, files)
        for action in self._afterwards:
            action()

    def whole(self, key: str, info: TensorInfo) -> Tensor:
        """A whole tensor in memory of its own; read once, however often it is asked for."""
        if key not in self._wholes:
            flat = info.empty()
            self._wholes[key] = info.view(flat)
            self._read(key, info.numel, 0, flat)
        return self._wholes[key]

    def values(self, state: ShardedState, names: Sequence[str]) -> None:
        """All parameters, whole, and the main parameters of the shard.

        Where the checkpoint has no main parameter, it follows from the parameter.
        """
        for sharded in state.optimizers:
            for buffers in sharded.buffers:
                buffers.main.fill_(torch.nan)  # equal to nothing, so that `main_from_params` keeps none of it
                for index, order in enumerate(buffers.order):
                    self.tensor(names[order], buffers.whole(index, buffers.params))
            for piece in sharded.pieces:
                name = names[piece.buffers.order[piece.where.parameter]]
                if name in self._contents.main:
                    self._piece(main_key(name), name, piece, piece.parameter.detach())
            self._afterwards += [buffers.main_from_params for buffers in sharded.buffers]

    def extras(self, extra_tensors: Mapping[str, Tensor]) -> None:
        """All other weights."""
        for name, tensor in extra_tensors.items():
            self.tensor(name, tensor.detach())

    def tensor(self, name: str, target: Tensor) -> None:
        """A parameter or buffer, whole."""
        key, info = weight_key(name), self._contents.weights[name]
        if info.same_order(target):
            self._read(key, info.numel, 0, _flat(target))
        else:
            whole = self.whole(key, info)
            self._afterwards.append(lambda: target.copy_(whole))

    def state(self, number: int, sharded: ShardedOptimizer, names: Sequence[str]) -> dict[int, dict[str, Any]]:
        """The state of an optimizer: by number of the piece. Complete only after `run`."""
        found: dict[int, dict[str, Any]] = {}
        for place, piece in enumerate(sharded.pieces):
            name = names[piece.buffers.order[piece.where.parameter]]
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

    def _piece(self, key: str, name: str, piece: Piece, target: Tensor) -> None:
        """The part of a parameter-like tensor that belongs to ``piece``."""
        weight = self._contents.weights[name]
        if weight.same_order(piece.whole):
            self._read(key, weight.numel, piece.where.param.start, _flat(target))
        else:
            whole = self.whole(key, TensorInfo(str(target.dtype).removeprefix("torch."), weight.shape, weight.stride))
            self._afterwards.append(lambda: target.copy_(piece.buffers.split(piece.where, whole)))

    def _read(self, key: str, numel: int, start: int, target: Tensor) -> None:
        if target.numel():
            self._chunks.append(Chunk(key, numel, start, target))


def _flat(tensor: Tensor) -> Tensor:
    """(numel,) the elements of a tensor without holes, in the order in which they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
