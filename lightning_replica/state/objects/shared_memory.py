"""Tensors and arrays that lie in one memory: told to another process, and made there.

``self.half = self.all[:2]`` follows what is written to the whole. Where a script makes both before training begins,
another process has both; where it makes them in a step, they are made here.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_replica._compat.dtensor import local_of
from lightning_replica._compat.torch import storage_of
from lightning_replica.devices.host import HOST
from lightning_replica.state.objects.contents import fill, is_content, plain_of

Place: TypeAlias = list[Any]
"""Where a value lies: the number of a memory, how many bytes that has, the first one of the value, strides in bytes."""


@dataclass(frozen=True)
class _Extent:
    """The bytes that a value lies in, from the lowest to behind the highest, and where its first element is."""

    device: str
    low: int
    high: int
    start: int
    strides: tuple[int, ...]
    is_contiguous: bool


class Sharing:
    """Finds among values that are sent those that lie in one memory."""

    def __init__(self) -> None:
        self._found: list[tuple[_Extent, list[Any]]] = []

    def add(self, value: Any, sent: list[Any]) -> list[Any]:
        """Note a tensor or an array and what is sent for it, which is returned; `tell` may add its place to that."""
        extent = _extent_of(plain_of(value))
        if extent is not None:
            self._found.append((extent, sent))
        return sent

    def tell(self) -> None:
        """Add to what is sent for values that share memory, or are not contiguous, where they lie."""
        group: list[tuple[_Extent, list[Any]]] = []
        high = 0
        for number, each in enumerate(sorted(self._found, key=lambda each: (each[0].device, each[0].low))):
            if group and (group[0][0].device != each[0].device or each[0].low >= high):
                _tell(number, group)
                group = []
            high = max(high, each[0].high) if group else each[0].high
            group.append(each)
        if group:
            _tell(len(self._found), group)
        self._found = []


def _tell(number: int, group: Sequence[tuple[_Extent, list[Any]]]) -> None:
    if len(group) == 1 and group[0][0].is_contiguous:
        return
    low, high = min(extent.low for extent, _ in group), max(extent.high for extent, _ in group)
    for extent, sent in group:
        sent.append([number, high - low, extent.start - low, list(extent.strides)])


def _extent_of(value: Any) -> _Extent | None:
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_meta or value.is_conj() or value.is_neg():
            return None
        size, start, device = value.element_size(), value.data_ptr(), str(value.device)
        strides, is_contiguous = tuple(stride * size for stride in value.stride()), value.is_contiguous()
    else:
        size, start, device = value.itemsize, value.__array_interface__["data"][0], str(HOST)
        strides, is_contiguous = value.strides, value.flags.c_contiguous
    if not all(value.shape):
        return None
    steps = [(length - 1) * stride for length, stride in zip(value.shape, strides, strict=True)]
    low = start + sum(step for step in steps if step < 0)
    return _Extent(device, low, start + sum(step for step in steps if step > 0) + size, start, strides, is_contiguous)


def is_writable(value: Any) -> bool:
    """Return whether code can write to a tensor or an array."""
    return isinstance(value, Tensor) or bool(value.flags.writeable)


def address_of(value: Any) -> int:
    """Return the address of the memory that a tensor or an array lies in, whole or in part; 0 if it has none."""
    if isinstance(value, Tensor):
        return storage_of(local_of(value))
    while isinstance(value.base, np.ndarray):
        value = value.base
    if isinstance(value.base, Tensor):
        return storage_of(value.base)
    found: int = value.__array_interface__["data"][0]
    return found


class OwnedMemory:
    """Tensors and arrays by the addresses of their memory.

    Args:
        owners: The same. Who changes it calls `changed`.
    """

    def __init__(self, owners: Mapping[int, Any]) -> None:
        self._owners = owners
        self._sorted: list[int] | None = None

    def changed(self) -> None:
        """Look at the owners again."""
        self._sorted = None

    def address_of(self, value: Any) -> int:
        """Return the address of the owner in whose memory a value lies; 0 if there is none.

        An array, and a tensor that was made of one, may know where they begin, and not where the whole memory does.
        """
        if not self._owners:
            return 0
        address = address_of(value)
        if address in self._owners:
            return address
        if isinstance(value, Tensor) and not is_of_array(value):
            return 0
        if self._sorted is None:
            self._sorted = sorted(self._owners)
        place = bisect_right(self._sorted, address) - 1
        before = self._sorted[place] if place >= 0 else 0
        return before if before and address < before + self._owners[before].nbytes else 0


def is_of_array(tensor: Tensor) -> bool:
    """Return whether a tensor lies in memory that is not torch's own, as that of an array."""
    return storage_of(local_of(tensor)) != 0 and not local_of(tensor).untyped_storage().resizable()


def array_over(owner: Tensor, offset: int, dtype: str, shape: Sequence[int], strides: Sequence[int]) -> Any:
    """Return an array in the memory of a tensor on the host; the offset counts bytes from its beginning."""
    return np.ndarray(tuple(shape), np.dtype(dtype), _bytes_of_storage(owner).numpy(), offset, tuple(strides))


def memories_of(values: Iterable[Any]) -> frozenset[int]:
    """Return the addresses of memories in which one of the values lies."""
    return frozenset(_counted(values))


def shared_memories(values: Iterable[Any]) -> frozenset[int]:
    """Return the addresses of memories in which several of the values lie."""
    return frozenset(address for address, count in _counted(values).items() if count > 1)


def _counted(values: Iterable[Any]) -> Counter[int]:
    contents = {id(each): each for each in values if isinstance(each, (Tensor, np.ndarray)) and is_content(each)}
    counts = Counter(address_of(each) for each in contents.values())
    del counts[0]
    return counts


class Memories:
    """Makes values lie in one memory that do so in another process."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, int]] = {}  # bytes, and where the memory begins in them

    def holds(self, place: Place, value: Any) -> bool:
        """Return whether a value that is here lies where it should; the first of a memory decides where that is."""
        number, length, offset, strides = place
        if not isinstance(value, (Tensor, np.ndarray)):
            return False
        extent, content = _extent_of(value), _bytes_under(value)
        if extent is None or content is None or list(extent.strides) != strides:
            return False
        begins = extent.start - offset
        if number not in self._known:
            start = begins - content.data_ptr()
            if start < 0 or start + length > len(content):
                return False  # there is no room for the others
            self._known[number] = content, start
        known, start = self._known[number]
        return bool(known.data_ptr() + start == begins)

    def tensor(self, place: Place, like: Tensor) -> Tensor | None:
        """Return a tensor in its place, with the shape, dtype and content of ``like``; None if there is no room."""
        _, _, offset, strides = place
        content, start = self._memory(place, like.device)
        size, first = like.element_size(), start + offset
        if first < 0 or first % size or len(content) % size or any(stride % size for stride in strides):
            return None
        try:
            made = content.view(like.dtype).as_strided(
                like.shape, [stride // size for stride in strides], first // size
            )
        except RuntimeError:  # it would end behind the memory
            return None
        fill(made, like)
        return made

    def array(self, place: Place, like: Any) -> Any:
        """Return an array in its place, with the shape, dtype and content of ``like``; None if there is no room."""
        _, _, offset, strides = place
        content, start = self._memory(place, torch.device(HOST))
        try:
            made: Any = np.ndarray(like.shape, like.dtype, content.numpy(), start + offset, strides)
        except (TypeError, ValueError):  # it would end behind the memory
            return None
        made[...] = like
        return made

    def _memory(self, place: Place, device: torch.device) -> tuple[Tensor, int]:
        number, length, *_ = place
        if number not in self._known:
            room = torch.zeros(-(-length // 16) * 16, dtype=torch.uint8, device=device)  # any dtype divides it
            self._known[number] = room, 0
        return self._known[number]


def _bytes_under(value: Any) -> Tensor | None:
    """Return all bytes of the memory that a value lies in."""
    if isinstance(value, Tensor):
        return _bytes_of_storage(value)
    while isinstance(value.base, np.ndarray):
        value = value.base
    if isinstance(value.base, Tensor):
        return _bytes_of_storage(value.base)
    if not value.flags.c_contiguous or not value.flags.writeable:
        return None
    return torch.from_numpy(value.reshape(-1).view(np.uint8))


def _bytes_of_storage(value: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage())
