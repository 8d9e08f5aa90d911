"""Where the tensors of a rank lie in those of the whole model: pure functions of integers.

[Note: boxes]
Where a model is divided among ranks, a tensor of a rank is a part of a tensor of the whole model, or consists of
several such parts. A `Box` says which part it is, and where its elements lie in the rank's tensor. If both a checkpoint
and the ranks that load it have boxes, then each rank finds the elements of its tensors in the checkpoint, no matter how
the model was divided when it was written (`sources`, `resharding`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod


@dataclass(frozen=True)
class Block:
    """A rectangular part of a tensor.

    Attributes:
        offset: Its first index, in each dimension.
        size: Its length, in each dimension.
    """

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def all_of(cls, shape: Sequence[int]) -> "Block":
        """Return the block that is a whole tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.size)

    def meet(self, other: "Block") -> "Block | None":
        """Return what both blocks have in common; None if that is nothing."""
        offset, size = [], []
        for mine, length, theirs, their_length in zip(self.offset, self.size, other.offset, other.size, strict=True):
            first, end = max(mine, theirs), min(mine + length, theirs + their_length)
            if first >= end:
                return None
            offset.append(first)
            size.append(end - first)
        return Block(tuple(offset), tuple(size))

    def without(self, inner: "Block") -> "list[Block]":
        """Return blocks that together are this one without ``inner``, which lies in it."""
        found, rest = [], self
        for axis, (first, length) in enumerate(zip(inner.offset, inner.size, strict=True)):
            begin, end = rest.offset[axis], rest.offset[axis] + rest.size[axis]
            if begin < first:
                found.append(rest._along(axis, begin, first))
            if first + length < end:
                found.append(rest._along(axis, first + length, end))
            rest = rest._along(axis, first, first + length)
        return found

    def _along(self, axis: int, begin: int, end: int) -> "Block":
        offset, size = list(self.offset), list(self.size)
        offset[axis], size[axis] = begin, end - begin
        return Block(tuple(offset), tuple(size))


@dataclass(frozen=True)
class Box:
    """A part of a tensor of the whole model that lies in one of a rank's tensors. See [Note: boxes].

    Attributes:
        key: The name of the tensor in the whole model.
        shape: Its shape there. It may have dimensions that the rank's tensor lacks, such as one for the layers.
        offset: The first index of the part there, in each dimension.
        size: The length of the part, in each dimension.
        start: Position of the part's first element in the rank's tensor, in the order of memory.
        strides: Elements of the rank's tensor from one index to the next, in each dimension.
        padded: Whether ``shape`` depends on how the model is divided: a vocabulary is padded to a multiple.
    """

    key: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    start: int
    strides: tuple[int, ...]
    padded: bool = False

    def __post_init__(self) -> None:
        """Refuse a part that does not lie in the tensor.

        Raises:
            ValueError: If it does not.
        """
        numbers = (*self.shape, *self.offset, *self.size, self.start, *self.strides)
        whole = all(type(each) is int and each >= 0 for each in numbers)
        same = len(self.shape) == len(self.offset) == len(self.size) == len(self.strides)
        if not whole or not same or any(a + b > c for a, b, c in zip(self.offset, self.size, self.shape, strict=True)):
            raise ValueError(f"a tensor of shape {self.shape} has no part of size {self.size} at {self.offset}")

    @property
    def block(self) -> Block:
        """The part of the whole model's tensor."""
        return Block(self.offset, self.size)

    def position(self, block: Block) -> int:
        """Return the position in the rank's tensor of the first element of ``block``, a part of this one."""
        steps = zip(block.offset, self.offset, self.strides, strict=True)
        return self.start + sum((inner - outer) * stride for inner, outer, stride in steps)

    def span(self, block: Block) -> tuple[int, int]:
        """Return the first position in the rank's tensor of the elements of ``block``, and the one after the last."""
        first = self.position(block)
        return first, first + _reach(block.size, self.strides) + 1

    def within(self, begin: int, end: int) -> Block | None:
        """Return a block that has all elements of this one whose positions are from ``begin`` up to ``end``.

        The block may have others too: it is cut along one dimension only, whose stride is the largest.
        """
        if not self.block.numel:
            return None
        axis = max(range(len(self.size)), key=lambda each: (self.size[each] > 1, self.strides[each]), default=None)
        if axis is None or self.size[axis] == 1 or not self.strides[axis]:
            first, after = self.span(self.block)
            return self.block if first < end and begin < after else None
        stride, reach = self.strides[axis], _reach(self.size, self.strides) - (self.size[axis] - 1) * self.strides[axis]
        low = max(0, -((self.start + reach - begin) // stride))
        high = min(self.size[axis], -((self.start - end) // stride))
        return self.block._along(axis, self.offset[axis] + low, self.offset[axis] + high) if low < high else None


@dataclass(frozen=True)
class Whole:
    """Where a rank's tensors lie in the whole model, as far as known.

    Attributes:
        boxes: The boxes of each tensor, by its name in a checkpoint.
        objects: What the whole model has beside tensors, by megatron-core's names.
    """

    boxes: Mapping[str, Sequence[Box]] = field(default_factory=dict)
    objects: Sequence[str] = ()


@dataclass(frozen=True)
class Found:
    """A part of a rank's tensor that lies in a stored one.

    Attributes:
        name: The name of the stored tensor.
        stored: The box of the stored tensor.
        local: The box of the rank's tensor.
        block: What both have in common, or a part of it.
    """

    name: str
    stored: Box
    local: Box
    block: Block


class Stored:
    """Where the tensors of the whole model lie in the tensors of a checkpoint.

    Args:
        boxes: The boxes of each of the checkpoint's tensors, by its name.
    """

    def __init__(self, boxes: Mapping[str, Iterable[Box]]) -> None:
        self._of_key: dict[str, dict[int | None, list[tuple[str, Box]]]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for name, each in boxes.items():
            for box in each:
                self._shapes.setdefault(box.key, box.shape)
                self._of_key.setdefault(box.key, {}).setdefault(_layer(box), []).append((name, box))

    @property
    def keys(self) -> list[str]:
        """The names of the whole model's tensors."""
        return list(self._of_key)

    def shape(self, key: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor of the whole model; None if the checkpoint has no part of it."""
        return self._shapes.get(key)

    def names(self, key: str) -> list[str]:
        """Return the stored tensors that have a part of a tensor of the whole model."""
        return list(dict.fromkeys(name for each in self._of_key[key].values() for name, _ in each))

    def find(self, local: Box) -> tuple[list[Found], list[Block]]:
        """Find each element of ``local`` once, no matter how often it is stored.

        Returns:
            Where the elements lie; and what of ``local`` is not stored.
        """
        found, missing = [], [local.block] if local.block.numel else []
        for name, stored in self._stored_near(local):
            if not missing:
                break
            left = []
            for block in missing:
                common = block.meet(stored.block)
                if common is None:
                    left.append(block)
                    continue
                found.append(Found(name, stored, local, common))
                left += block.without(common)
            missing = left
        return found, missing

    def _stored_near(self, local: Box) -> Iterable[tuple[str, Box]]:
        """Return the boxes that may have elements of ``local``. A layer is compared with itself only."""
        layers = self._of_key.get(local.key, {})
        layer = _layer(local)
        if layer is None:
            return [pair for each in layers.values() for pair in each]
        return [*layers.get(layer, ()), *layers.get(None, ())]


def _layer(box: Box) -> int | None:
    """Return the index in the first dimension if it is only one, as it is where the dimension stands for layers."""
    return box.offset[0] if box.size and box.size[0] == 1 else None


def _reach(size: Sequence[int], strides: Sequence[int]) -> int:
    return sum((length - 1) * stride for length, stride in zip(size, strides, strict=True))
