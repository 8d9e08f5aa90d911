"""Copies of what tensors and arrays hold, and a watch that finds by content which of them have changed.

torch counts the writes to a tensor, but not those through ``.data``, through NumPy or by a kernel; NumPy counts none.
So content is compared. What is small, and what has been seen to change, is compared and copied in every snapshot. The
rest (masks, tables, a frozen backbone, a dataset in memory) is compared as a whole in the first windows only, because
most of what changes does so from the first step on. Afterwards a part of it is compared in each window, so that all of
it has been compared after some of them. A write that is found that late is reported by name, with the steps since the
comparison before.

What is large has a copy only if all of it together takes no more than `COPIED_BYTES`. Without a copy, a first write
cannot be undone; that is reported, too.
"""

from collections.abc import Iterable, MutableMapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_replica._compat.dtensor import is_divided, local_of, set_local
from lightning_replica._compat.torch import data_version, is_wrapper, of_base_class, of_class
from lightning_replica.core.inexact import Report
from lightning_replica.core.plain import is_plain
from lightning_replica.devices.host import on_host, same_bits

COPIED_BYTES: Final = 2**28
FIRST_WINDOWS: Final = 3
_COMPARED_BYTES: Final = 2**20  # of what has not been seen to change, in each snapshot
_PART: Final = 1 << 16  # elements of one tensor that are compared in one window
_BASE_CLASSES: Final = (Tensor, nn.Parameter)
_PARTS: Final = 4  # tensors of which a part is compared in one window

Copy: TypeAlias = Any
"""A tensor or an array that nobody writes to; None if there is no copy."""

# The memory that what was copied had. It is no attribute of the copy: those travel with it, and memory stays here.
_memory_of_original: Final[MutableMapping[Tensor, Tensor]] = WeakTensorKeyDictionary()


class Held:
    """A tensor or an array that is watched.

    Attributes:
        value: The tensor or array.
        name: Its name in messages.
        nbytes: Size of the content when it was last taken, in bytes.
        copy: What it held when it was last taken; None if it is large and has not been seen to change.
        follows: Whether it has been seen to change.
        seen: The window in which a part of it was last compared.
        changes: How often it has been seen to change.
        learns: Whether it is a tensor that required a gradient when it was last taken. Copies have an attribute of
            this name if it did.
        is_marked: Whether it is a tensor that had attributes of the user's when it was last taken.
    """

    def __init__(self, value: Any, name: str) -> None:
        self.value, self.name, self.follows = value, name, False
        self._counts = isinstance(value, Tensor) and not value.is_inference()
        self._divided = is_divided(value)
        self._has_address = isinstance(value, Tensor) and value.layout is torch.strided
        self.copy: Copy = None
        self.nbytes: int = plain_of(value).nbytes
        self.seen = self.changes = 0
        self.learns, self.is_marked = learns(value), is_marked(value)
        self._sample: Copy = None
        self._address = 0  # of what was copied
        self._place = 0
        self.writes = self._count()

    def _count(self) -> int:
        if not self._counts:
            return 0
        return data_version(local_of(self.value) if self._divided else self.value)

    def take(self) -> None:
        """Copy the content."""
        self.writes = self._count()
        self.copy = marked_copy_of(self.value)
        if isinstance(self.copy, Tensor):
            _memory_of_original[self.copy] = plain_of(self.value)
        self._address = self._address_now()
        self.nbytes = self.copy.nbytes
        self.learns, self.is_marked = learns(self.value), is_marked(self.value)

    def is_written(self) -> bool:
        """Return whether torch has counted a write since the last copy or look, or it learns or has attributes now.

        Other memory counts, too, where the content is copied: ``.data`` may have made two tensors share it.
        """
        return (
            self._count() != self.writes
            or learns(self.value) != self.learns
            or is_marked(self.value) != self.is_marked
            or (self.copy is not None and self._address_now() != self._address)
        )

    def _address_now(self) -> int:
        """Return where the memory of a tensor begins; 0 of one that has none of its own, and of an array."""
        if not self._has_address:
            return 0
        value = self.value if type(self.value) in _BASE_CLASSES else plain_of(self.value)
        return int(value.data_ptr())

    def put_back(self, copy: Copy, still_learns: bool = False) -> None:
        """Write the content of ``copy`` if the present one is another.

        Args:
            copy: What `take` has copied, here or in another process.
            still_learns: Whether a tensor that requires a gradient goes on to, whatever the copy says.
        """
        if learns(self.value) and not hasattr(copy, "learns") and not (still_learns and self.value.is_leaf):
            with suppress(RuntimeError):  # since then, or it has become a part of a graph; a view cannot
                self.value.detach_().grad = None
        self._regain_memory(copy)
        content = plain_of(self.value)
        if same_content(content, copy):
            return
        with torch.no_grad():
            if not isinstance(content, Tensor):
                _fill_array(content, copy)
            elif (content.shape, content.dtype) == (copy.shape, copy.dtype):
                fill(content, copy)
            else:
                set_local(self.value, copy.clone())
        self.writes = self._count()

    def _regain_memory(self, copy: Copy) -> None:
        """Give a tensor the memory that it had, if ``.data`` or ``t_()`` has given it other, which it may share."""
        memory, content = memory_of_original(copy), plain_of(self.value)
        if memory is None or (content.data_ptr(), content.stride()) == (memory.data_ptr(), memory.stride()):
            return
        last = memory.storage_offset() + sum((n - 1) * by for n, by in zip(memory.shape, memory.stride(), strict=True))
        if memory.numel() and memory.untyped_storage().nbytes() > last * memory.element_size():
            set_local(self.value, memory)

    def look(self) -> bool:
        """Compare a part with what it held when it was last looked at; look at another part from then on."""
        row = _row(self.value)
        changed = self.is_written() or (self._sample is not None and not same_content(self._part(row), self._sample))
        self.writes, self.learns, self.is_marked = self._count(), learns(self.value), is_marked(self.value)
        if self.copy is None:
            self._place = (self._place + _PART) % max(1, len(row) - _PART + 1)
            self._sample = copy_of(self._part(row))
        return changed

    def differs_here(self) -> bool:
        """Compare one part with the copy, and go on to the next."""
        row, copy = _row(self.value), self.copy.reshape(-1)
        same = row.shape == copy.shape and same_content(self._part(row), self._part(copy))
        self._place = 0 if self._place + _PART >= len(row) else self._place + _PART
        return not same

    def _part(self, row: Any) -> Any:
        return row[self._place : self._place + _PART]


def fill(tensor: Tensor, values: Tensor) -> None:
    """Copy values of the same shape into a tensor; into each place in memory once, if it is expanded."""
    if tensor.layout is not torch.strided:
        tensor.copy_(values)
        return
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    part = tuple(slice(0, 1) if stride == 0 and length > 1 else slice(None) for length, stride in sizes)
    # Only in that mode may a tensor be written to that was made in it.
    with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
        tensor[part].copy_(values[part])


def _fill_array(array: Any, values: Any) -> None:
    """Copy values into an array, also into one that is locked. A view that cannot be written to follows its base."""
    if array.shape != values.shape:
        array.resize(values.shape, refcheck=False)
    if array.flags.writeable:
        array[...] = values
        return
    if array.base is not None and 0 in array.strides:
        return
    try:
        array.flags.writeable = True
    except ValueError:
        return
    array[...] = values
    array.flags.writeable = False


def learns(value: Any) -> bool:
    """Return whether a value is a tensor that requires a gradient."""
    return isinstance(value, Tensor) and value.requires_grad


def is_marked(value: Any) -> bool:
    """Return whether a value is a tensor with attributes of the user's."""
    return isinstance(value, Tensor) and bool(vars(value))


def late(windows: int) -> str:
    """Return what it means that a write may have happened in any of the last ``windows`` steps, for people."""
    return (
        f"it has been written to for the first time in one of the last {windows} steps, in a way that was seen only"
        " now: if a fault came since, it went back to its former content. From now on it is restored"
    )


class Contents:
    """Watches tensors and arrays; see the top of the file.

    Args:
        report: Called with the name of what is written to in a way that is found late, and what that means.
        copied_bytes: Below this size all together have copies from the start.
    """

    def __init__(self, report: Report, copied_bytes: int = COPIED_BYTES) -> None:
        self._report, self._copied_bytes = report, copied_bytes
        self._held: dict[int, Held] = {}
        self._bytes, self._turn, self._windows = 0, 0, 0

    @property
    def held(self) -> dict[int, Held]:
        """What is watched, by ``id``."""
        return self._held

    def add(self, value: Any, name: str) -> Held:
        """Watch a tensor or an array from now on."""
        held = self._held.get(id(value))
        if held is None:
            held = self._held[id(value)] = Held(value, name)
            self._bytes += held.nbytes
            # What comes up in the middle of a training is new each time, as an output that a list collects.
            held.seen = self._windows
            if self._is_copied(held):
                held.take()
            else:
                held.look()
        return held

    def restart(self) -> None:
        """Count windows from the first one again."""
        self._windows = 0

    def keep(self, values: Iterable[int]) -> None:
        """Watch only the values with these ``id``."""
        wanted = set(values)
        if wanted != self._held.keys():
            self._held = {key: held for key, held in self._held.items() if key in wanted}
            self._bytes = sum(held.nbytes for held in self._held.values())

    def refresh(self, window: bool, whole: bool = False) -> list[Held]:
        """Copy what has changed.

        Args:
            window: Whether a window of batches begins. In the middle of a step, less is compared.
            whole: Whether everything is compared, whatever its size.

        Returns:
            What has changed.
        """
        self._windows += window
        room, compared, parts = _COMPARED_BYTES, list[Held](), list[Held]()
        everything = whole or self._windows <= FIRST_WINDOWS
        changed: list[Held] = []
        for held in self._held.values():
            if held.copy is None or held.is_written():
                (parts if held.copy is None and not held.is_written() else changed).append(held)
            elif held.follows or everything or held.nbytes <= room:
                room -= 0 if held.follows else min(room, held.nbytes)
                compared.append(held)
            else:
                parts.append(held)
        pairs = [(plain_of(held.value), held.copy) for held in compared]
        changed += [held for held, same in zip(compared, same_pairs(pairs), strict=True) if not same]
        if window:
            changed += self._look_at(parts)
            for held in compared:
                held.seen = self._windows
        for held in changed:
            held.follows, held.seen = True, self._windows
            held.changes += 1
            held.take()
        return changed

    def _look_at(self, parts: Sequence[Held]) -> list[Held]:
        some = parts if self._windows <= FIRST_WINDOWS else [
            parts[(self._turn + place) % len(parts)] for place in range(min(_PARTS, len(parts)))
        ]  # fmt: skip
        self._turn += _PARTS
        found = [held for held in some if (held.look() if held.copy is None else held.differs_here())]
        for held in found:
            if self._windows > FIRST_WINDOWS:
                self._report(held.name, late(self._windows - held.seen), "once")
        return found

    def _is_copied(self, held: Held) -> bool:
        return self._bytes <= self._copied_bytes or held.nbytes <= _PART


def same_pairs(pairs: Sequence[tuple[Any, Any]]) -> list[bool]:
    """Return for each two tensors or arrays whether they hold the same bits; wait for each device once."""
    found = [True] * len(pairs)
    devices: dict[torch.device, list[int]] = {}
    for place, (a, b) in enumerate(pairs):
        if isinstance(a, Tensor) and not on_host(a) and is_like(a, b):
            devices.setdefault(a.device, []).append(place)
        else:
            found[place] = same_content(a, b)
    for places in devices.values():
        flags = [(_bytes(pairs[n][0]) == _bytes(pairs[n][1])).all() for n in places]
        for place, same in zip(places, torch.stack(flags).tolist(), strict=True):
            found[place] = same
    return found


def is_content(value: Any) -> bool:
    """Return whether the bits of a tensor or an array can be compared and copied; of others, too little is known."""
    if not isinstance(value, Tensor):
        return not value.dtype.hasobject
    local = local_of(value)
    if local.is_nested or nn.parameter.is_lazy(local):
        return False
    return is_plain(local) and not is_wrapper(local)


def plain_of(value: Any) -> Any:
    """Return an array without its class, or a tensor without its graph, its class and what other ranks have of it."""
    if type(value) in _BASE_CLASSES:
        return value.detach()
    if isinstance(value, Tensor):
        return of_base_class(local_of(value))
    return value if type(value) is np.ndarray else value.view(np.ndarray)


def copy_of(value: Any) -> Any:
    """Return a copy of what a tensor or an array holds."""
    content = plain_of(value)
    return content.clone() if isinstance(content, Tensor) else content.copy()


def memory_of_original(copy: Copy) -> Tensor | None:
    """Return the memory of the tensor that was copied; None of an array, and if another process made the copy."""
    return _memory_of_original.get(copy) if isinstance(copy, Tensor) else None


def marked_copy_of(value: Any) -> Any:
    """Return a copy that says by an attribute whether a tensor learns; see `Held`."""
    copy = copy_of(value)
    if learns(value):
        copy.learns = True
    return copy


def with_class_of(content: Tensor, like: Tensor) -> Tensor:
    """Return a tensor with the memory of ``content``, and the class and the attributes of ``like``."""
    if type(like) in _BASE_CLASSES:
        return content
    made = of_class(content, type(like))
    vars(made).update(vars(like))
    return made


def is_like(a: Any, b: Any) -> bool:
    """Return whether two tensors or arrays have the same shape and dtype."""
    return bool(a.shape == b.shape and a.dtype == b.dtype)


def same_content(a: Any, b: Any) -> bool:
    """Return whether two tensors or two arrays hold the same bits; 0.0 equals -0.0, but does not divide like it."""
    if not is_like(a, b):
        return False
    if isinstance(a, Tensor):
        return a.device == b.device and same_bits(_in_a_row(a), _in_a_row(b))
    return np.array_equal(_words(a), _words(b))


def _in_a_row(tensor: Tensor) -> Tensor:
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.resolve_conj().resolve_neg().contiguous()


def _row(value: Any) -> Any:
    content = plain_of(value)
    return content.reshape(-1) if isinstance(content, Tensor) else np.ascontiguousarray(content).reshape(-1)


def _words(array: Any) -> Any:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _bytes(tensor: Tensor) -> Tensor:
    return _in_a_row(tensor).reshape(-1).view(torch.uint8)
