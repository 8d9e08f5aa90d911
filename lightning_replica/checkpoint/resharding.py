"""Loading of a checkpoint into ranks that divide the model otherwise than those that wrote it.

Each rank reads the blocks of its tensors out of the stored ones (`sources`), in batches of bounded memory.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_replica.checkpoint import verification
from lightning_replica.checkpoint.boxes import Block, Box, Found, Whole
from lightning_replica.checkpoint.chunks import Chunk, ChunkReader
from lightning_replica.checkpoint.contents import (
    Contents,
    TensorInfo,
    dtype_name,
    main_key,
    named_dtype,
    read_contents,
    state_key,
    weight_key,
)
from lightning_replica.checkpoint.location import Given, locate
from lightning_replica.checkpoint.sources import Sources, is_needed
from lightning_replica.sharding.engine import Checkpointable, HeldPiece, OptimizerShard

_BATCH_BYTES = 1 << 28


class Resharding:
    """Reads a rank's tensors out of a checkpoint.

    Args:
        sources: Where they lie.
        reader: Reads the checkpoint.
    """

    def __init__(self, sources: Sources, reader: ChunkReader) -> None:
        self._sources, self._contents = sources, sources.contents
        self._batch = Batch(sources.contents, reader)

    def run(self) -> None:
        """Complete what was begun."""
        self._batch.read()

    def values(self, state: Checkpointable, names: Sequence[str]) -> None:
        """Read all parameters, whole, and the main parameters of the shard.

        A main parameter that the checkpoint does not have is computed from the parameter.
        """
        for sharded in state.optimizers:
            sharded.forget_main()
            have_main = sharded.main_dtypes()
            for order, whole in sharded.wholes().items():
                self.tensor(names[order], whole.detach())
            for piece in sharded.pieces:
                name = names[piece.order]
                if piece.order in have_main and all(each in self._contents.main for each in self._sources.names(name)):
                    self._piece(main_key, name, piece, piece.parameter.detach())
        self.run()
        for sharded in state.optimizers:
            sharded.main_from_params()

    def extras(self, extra_tensors: Mapping[str, Tensor]) -> None:
        """Read all other weights."""
        for name, tensor in extra_tensors.items():
            self.tensor(name, tensor.detach())

    def tensor(self, name: str, target: Tensor) -> None:
        """Read one whole parameter or buffer into ``target``. What is not stored (padding) stays as it is."""
        info = self._sources.weights[name]
        same = info.same_order(target)
        held = target if same else torch.empty_strided(info.shape, info.stride, dtype=target.dtype).copy_(target)
        flat = held.as_strided((info.numel,), (1,), held.storage_offset())
        for found in self._sources.between(name, 0, info.numel):
            self._block(self._values_of(found.name, target.dtype), found, flat, 0)
        if not same:
            self._batch.then(lambda: target.copy_(held))

    def state(self, number: int, sharded: OptimizerShard, names: Sequence[str]) -> dict[int, dict[str, Any]]:
        """Read an optimizer's state and return it, by number of the piece. Complete only after `run`."""
        found: dict[int, dict[str, Any]] = {}
        source_number = self._sources.number(number)
        for place, piece in enumerate(sharded.pieces):
            name = names[piece.order]
            info = self._sources.state(number, name)
            if info is None:
                continue
            found[place] = copy.deepcopy(info.plain)
            for key, dtype in info.like.items():
                target = torch.empty_like(piece.parameter, dtype=named_dtype(dtype), requires_grad=False)
                self._piece(partial(state_key, source_number, key=key), name, piece, target)
                found[place][key] = target
            for key, whole in info.whole.items():
                (stored,) = self._sources.names(name)
                flat = whole.empty()
                self._batch.add(state_key(source_number, stored, key), 0, whole.numel, flat.copy_)
                found[place][key] = whole.view(flat)
        return found

    def groups(self, state: Checkpointable) -> list[list[dict[str, Any]]]:
        """Return the hyperparameters of the param groups of each optimizer: its own if the checkpoint has none."""
        if self._sources.is_imported:
            return [each.optimizer.param_groups for each in state.optimizers]
        return [each.groups for each in self._contents.optimizers]

    def _values_of(self, stored: str, dtype: torch.dtype) -> str:
        """Return what holds the values of a stored tensor in ``dtype``: a main parameter may have more bits."""
        wanted = dtype_name(dtype)
        has_more = self._contents.weights[stored].dtype != wanted and self._contents.main.get(stored) == wanted
        return main_key(stored) if has_more else weight_key(stored)

    def _piece(self, key_of: Callable[[str], str], name: str, piece: HeldPiece, target: Tensor) -> None:
        """Read the part of a parameter-like tensor that belongs to ``piece``. What is not stored becomes zero."""
        begin, end = piece.start, piece.start + target.numel()
        found = self._sources.between(name, begin, end)
        spans = [each.local.span(each.block) for each in found]
        low, high = min([begin, *(first for first, _ in spans)]), max([end, *(after for _, after in spans)])
        flat = torch.zeros(high - low, dtype=target.dtype)
        for each in found:
            self._block(key_of(each.name), each, flat, low)
        into = target.as_strided((target.numel(),), (1,), target.storage_offset())
        self._batch.then(lambda: into.copy_(flat[begin - low : end - low]))

    def _block(self, key: str, found: Found, flat: Tensor, low: int) -> None:
        """Read one block into ``flat``, the elements of the rank's tensor from position ``low`` on."""
        into = strided(flat, found.local, found.block, low)
        self._batch.block(key, found.stored, found.block, into)


@torch.no_grad()
def read_weights(
    path: Given, parts: Sequence[str], weights: Mapping[str, TensorInfo], whole: Whole
) -> dict[str, Tensor] | None:
    """Read a rank's weights alone. Checksums of tensors are not compared.

    Args:
        path: The checkpoint, or its URL.
        parts: What the names of this rank's parts of the model begin with.
        weights: The rank's tensors, by their names in a checkpoint.
        whole: Where they lie in the whole model.

    Returns:
        The tensors by the same names; None if the checkpoint has them by these names.

    Raises:
        CheckpointError: If the checkpoint is damaged, or of another model.
    """
    directory = verification.published(locate(path))
    manifest, contents = verification.check(directory), read_contents(directory)
    if not is_needed(contents, parts, weights, whole.boxes):
        return None
    reads = Resharding(Sources(contents, parts, weights, whole.boxes), ChunkReader(directory, manifest.files))
    found = {name: torch.zeros(info.shape, dtype=named_dtype(info.dtype)) for name, info in weights.items()}
    reads.extras(found)
    reads.run()
    return found


class Batch:
    """Parts of stored tensors that are read together; when they have become many, at once.

    Args:
        contents: What the checkpoint holds.
        reader: Reads it.
    """

    def __init__(self, contents: Contents, reader: ChunkReader) -> None:
        self._tensors, self._reader = contents.tensors(), reader
        self._ends: dict[tuple[str, int], int] = {}  # of each range, by its tensor and first element
        self._uses: list[tuple[tuple[str, int], Callable[[Tensor], object]] | Callable[[], object]] = []
        self._size_bytes = 0

    def block(self, key: str, box: Box, block: Block, into: Tensor) -> None:
        """Copy a block of a stored tensor, whose box is ``box``, to ``into``, which has the block's shape."""
        first, after = box.span(block)
        self.add(key, first, after, lambda read: into.copy_(strided(read, box, block, first)))

    def add(self, key: str, first: int, after: int, use: Callable[[Tensor], object]) -> None:
        """Read the elements of a stored tensor from ``first`` up to ``after``, and pass them to ``use``.

        What it gets is flat, and may have more elements at its end.
        """
        at = (key, first)
        more = after - max(first, self._ends.get(at, first))
        self._size_bytes += max(0, more) * named_dtype(self._tensors[key][1]).itemsize
        self._ends[at] = max(after, self._ends.get(at, after))
        self._uses.append((at, use))
        if self._size_bytes >= _BATCH_BYTES:
            self.read()

    def then(self, action: Callable[[], object]) -> None:
        """Call ``action`` once all that was added has been used."""
        self._uses.append(action)

    def read(self) -> None:
        """Read everything that was added since the last call, and use it, in this order."""
        ranges = {
            (key, first): torch.empty(after - first, dtype=named_dtype(self._tensors[key][1]))
            for (key, first), after in self._ends.items()
        }
        self._reader.read([Chunk(key, self._tensors[key][0], first, data) for (key, first), data in ranges.items()])
        for each in self._uses:
            if isinstance(each, tuple):
                each[1](ranges[each[0]])
            else:
                each()
        self._ends, self._uses, self._size_bytes = {}, [], 0


def strided(flat: Tensor, box: Box, block: Block, low: int) -> Tensor:
    """Return a view of ``block`` in ``flat``, the elements of a tensor from position ``low`` on, which has ``box``."""
    return flat.as_strided(block.size, box.strides, flat.storage_offset() + box.position(block) - low)
