"""State that all ranks have but that may differ between them: of schedulers, of callbacks, logged values and modes.

A metric that is logged without ``sync_dist`` has another value on every rank. Then the state that early stopping, a
checkpoint callback or a plateau scheduler derives from it differs, too. A replacement first takes these states from a
peer, with the rest of the replicated part. Then it replaces them with its predecessor's, which its peers have kept.

These states are sent twice a step and seldom change. So the copy of a state and its packed form are kept until
something in the state differs from the copy. A state that is large (`_LARGE_BYTES`), or that `plain.pack` cannot pack,
is not mirrored: a replacement then has a peer's, and that is reported.
"""

import copy
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_replica._compat.packages import is_of_lightning
from lightning_replica._compat.torch import write_count
from lightning_replica.core import plain
from lightning_replica.core.inexact import Report, warn
from lightning_replica.devices.host import HOST, on_host, same_bits
from lightning_replica.state.atoms import ATOMS, is_same_atom

_LARGE_BYTES = 64 * 1024
_MANY = 64  # elements; a larger tensor among the logged values is not mirrored
_DEEP = 16  # containers in containers; deeper ones are not followed, because they may contain themselves
MODES = (
    *("val_seen", "val_has_run", "logger_fx", "training", "accumulate", "gradient", "requires_grad", "should_stop"),
    *("scheduler_configs", "precision", "fit_loop", "epoch_loop", "trainer", "settings", "buffers_due", "momenta"),
)
"""What code sets on each rank, by its name in a snapshot's replicated part: modes of modules, limits, settings."""

MODES_BYTES = 2**22  # of one of them, as the modes of many modules
_NUMBERS = frozenset((type(None), bool, int, float))
_TENSORS = (Tensor, nn.Parameter)


@dataclass(frozen=True)
class _Kept:
    """A state as it was when it was last copied.

    Attributes:
        copy: The copy of the state, detached from its owner.
        packed: The state as it is mirrored; empty if it is not.
        tensors: By ``id``, the owner's tensors on a device, with their versions at that time. They are compared by
            version, not by content.
    """

    copy: Any
    packed: bytes
    tensors: dict[int, tuple[Tensor, int]]


class States:
    """Takes states; copies and packs only those that have changed since they were last taken.

    Args:
        what: What the states belong to, for messages.
        report: Called with a state that is not mirrored.
        most: The size up to which a state is mirrored.
    """

    def __init__(self, what: str = "", report: Report = warn, most: int = _LARGE_BYTES) -> None:
        self._what, self._report, self._most = what, report, most
        self._kept: dict[str, _Kept] = {}

    def take(self, key: str, owner: object, state: Any, is_recorded: bool = False) -> Any:
        """Copy a state.

        Args:
            key: The name of the state, the same whenever it is taken.
            owner: The object that the state belongs to. If its class is Lightning's or torch's, versions of tensors
                are trusted, because that code is known to raise a tensor's version when it writes to the tensor.
            state: The state, which may share mutable objects with its owner.
            is_recorded: Whether `state.reachable` restores all that the owner refers to.

        Returns:
            The copy, which nobody may change; None if nobody needs it: the state refers to objects, or is large, and
            is recorded.
        """
        known = self._kept.get(key)
        if known is None or not _is_same(state, known.copy, known.tensors):
            packed = _packed(state, self._most)
            copied = copy.deepcopy(state) if packed or not is_recorded else None
            module = type(owner).__module__
            own = not is_of_lightning(module) and module.partition(".")[0] != "torch"
            known = self._kept[key] = _Kept(copied, packed, {} if own else dict(_tensors_of(state)))
            if not packed and not is_recorded:
                why = "it is large or no plain data, so a replaced rank takes that of a peer, which may be another"
                self._report(f"the state of {self._what} {key}", why, "unknown")
        return known.copy

    def packed(self, key: str) -> bytes:
        """Return what was last taken under ``key``, as it is mirrored; empty if it is not."""
        return self._kept[key].packed


class Logged:
    """Packs the values last logged for loggers, callbacks and the progress bar; most are the same objects as before."""

    def __init__(self) -> None:
        self._names: list[list[str]] = []
        self._packed_names = b""
        self._values: list[Any] = []
        self._plain: dict[int, Any] = {}
        self._packed = b""

    def pack(self, logged: list[dict[str, Any]]) -> bytes:
        """Pack ``logged``, and return empty bytes if the result is too large."""
        names = [list(values) for values in logged]
        values = [value for each in logged for value in each.values()]
        if names == self._names and all(map(operator.is_, values, self._values)):
            return self._packed
        if names != self._names:
            self._names, self._packed_names = names, plain.pack_lists(names)
        former = self._plain  # its objects are still in `_values`, so that no other object can have their `id`
        distinct = {id(value): value for value in values}
        self._plain = {i: former[i] if i in former else _value_to_plain(value) for i, value in distinct.items()}
        self._values = values
        place = {i: number for number, i in enumerate(distinct)}
        rows = [self._packed_names, [place[id(value)] for value in values], list(self._plain.values())]
        packed = plain.pack_lists(rows)
        self._packed = packed if len(packed) <= _LARGE_BYTES else b""
        return self._packed


class Own:
    """Joins packed states, and does so again only when one of them has changed."""

    def __init__(self) -> None:
        self._states: tuple[Any, ...] = ()
        self._packed_states = self._logged = b""
        self._packed = plain.Pieces()

    def pack(
        self,
        schedulers: list[bytes],
        callbacks: list[tuple[str, bytes]],
        modes: list[tuple[str, bytes]],
        logged: bytes,
    ) -> plain.Pieces:
        """Pack states of schedulers in their order, those of callbacks and modes by name, and the logged values."""
        if (schedulers, callbacks, modes) != self._states:
            self._states = (schedulers, callbacks, modes)
            self._packed_states, self._packed = plain.pack_lists([*self._states]), plain.Pieces()
        if logged is not self._logged or not self._packed:
            self._logged, self._packed = logged, plain.pack_lists_in_pieces([self._packed_states, logged])
        return self._packed


def put(replicated: dict[str, Any], own: bytes | plain.Pieces) -> None:
    """Replace a peer's states with the rank's own.

    Args:
        replicated: The replicated part of a peer's snapshot, which is changed in place.
        own: The result of `Own.pack`; if it is empty, nothing changes.
    """
    if not own:
        return
    states, logged = plain.unpack(bytes(own))
    schedulers, callbacks, modes = plain.unpack(states)
    for place, packed in enumerate(schedulers):
        if packed:
            replicated["schedulers"][place] = plain.unpack(packed, placed=True)
    for key, packed in callbacks:
        replicated["callbacks"][key] = plain.unpack(packed, placed=True)
    for name, packed in modes:
        if packed:
            replicated[name] = plain.unpack(packed, placed=True)
    if logged:
        replicated["logged"] = _logged_of(logged, replicated["logged"])


def _packed(state: Any, most: int) -> bytes:
    if _room_after(state, most, 0) < 0:
        return b""
    try:
        packed = plain.pack(state)
    except plain.NotPlainError:
        return b""
    return packed if len(packed) <= most else b""


def _room_after(state: Any, room: int, depth: int) -> int:
    """Return about how many of ``room`` bytes a state leaves; negative as soon as it is known to be too large."""
    if isinstance(state, Tensor):
        return room - state.numel() * state.element_size()
    if isinstance(state, (str, bytes)):
        return room - len(state)
    if not isinstance(state, (list, tuple, dict)):
        return room - 8
    if depth > _DEEP:
        return -1
    for item in state.values() if isinstance(state, dict) else state:
        room = room - 8 if type(item) in _NUMBERS else _room_after(item, room - 8, depth + 1)
        if room < 0:
            break
    return room


def _is_same(now: Any, then: Any, tensors: dict[int, tuple[Tensor, int]], depth: int = 0) -> bool:
    """Return whether a state equals its copy to the last bit; values of unknown types always count as different."""
    kind = type(now)
    if kind is not type(then):
        return False
    if kind in ATOMS:
        return is_same_atom(now, then)
    if kind in _TENSORS:
        return _is_same_tensor(now, then, tensors)
    if depth > _DEEP or kind not in (dict, list, tuple) or len(now) != len(then):
        return False
    if kind is dict:
        keys = zip(now, then, strict=True)
        if not all(a is b or (type(a) in ATOMS and is_same_atom(a, b)) for a, b in keys):
            return False
        now, then = now.values(), then.values()
    # A deep copy of an object is the object itself only if that cannot change.
    return all(a is b or _is_same(a, b, tensors, depth + 1) for a, b in zip(now, then, strict=True))


def _is_same_tensor(now: Tensor, then: Tensor, tensors: dict[int, tuple[Tensor, int]]) -> bool:
    if now.device != then.device or now.dtype != then.dtype or now.shape != then.shape:
        return False
    if not on_host(now):  # to compare the content, one would have to wait for the device
        known = tensors.get(id(now))
        return known is not None and known[1] == write_count(now)
    if now.layout is not torch.strided or now.is_quantized or not (now.is_contiguous() and then.is_contiguous()):
        return False
    return now.requires_grad == then.requires_grad and same_bits(now, then)


def _tensors_of(state: Any, depth: int = 0) -> Iterable[tuple[int, tuple[Tensor, int]]]:
    """Yield the tensors in a state that are on a device, by ``id``, with their versions."""
    if isinstance(state, Tensor):
        if not on_host(state):
            yield id(state), (state, write_count(state))
    elif type(state) in (dict, list, tuple) and depth <= _DEEP:
        for item in state.values() if isinstance(state, dict) else state:
            yield from _tensors_of(item, depth + 1)


def _value_to_plain(value: Any) -> Any:
    """Return a logged value as plain data; an empty list if it is not mirrored."""
    if type(value) in ATOMS:
        return [value]
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_quantized:
        return []
    if not 0 < value.numel() <= _MANY or value.is_complex():
        return []
    return [value.tolist(), str(value.dtype)[6:], on_host(value)]  # without "torch."


def _value_of(sent: list[Any]) -> Any:
    if len(sent) == 1:
        return sent[0]
    content, dtype, host = sent
    return torch.tensor(content, dtype=getattr(torch, dtype), device=HOST if host else plain.own_device())


def _logged_of(packed: bytes, theirs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what `Logged` has packed, with a peer's values in place of those that were not mirrored."""
    packed_names, places, sent = plain.unpack(packed)
    values = [[_value_of(each)] if each else [] for each in sent]
    place, found = iter(places), []
    for names, peer in zip(plain.unpack(packed_names), theirs, strict=True):
        own = {name: values[next(place)] for name in names}
        found.append({name: each[0] if each else peer[name] for name, each in own.items() if each or name in peer})
    return found
