"""Digests by which two processes, or two runs, find where their objects differ.

A signature has one digest for each attribute of each root. It covers classes, shapes, dtypes and who refers to what;
and contents, if they are asked for. Everything that has a name in every process counts by its name.
"""

import hashlib
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from lightning_replica.core import plain
from lightning_replica.core.inexact import warn
from lightning_replica.state.atoms import ATOMS
from lightning_replica.state.objects.capture import Anchors, Capture, Content, Recorder, Root
from lightning_replica.state.objects.contents import plain_of
from lightning_replica.state.objects.kinds import Kind, describe, has_value, kind_of, probe, value_of
from lightning_replica.state.objects.records import (
    REQUIRES_GRAD,
    Bytes,
    Graphed,
    Iterated,
    Members,
    Memory,
    Randomness,
    Record,
    Stream,
    Unknown,
    base_of,
)

Signature: TypeAlias = dict[str, str]
"""Digests by name, as ``module.rnn._flat_weights``."""


def signature_of(capture: Capture, anchors: Anchors, contents: bool) -> Signature:
    """Return the signature of what was captured.

    Args:
        capture: What was captured.
        anchors: What has a name in every process.
        contents: Whether contents count, and not only what refers to what.
    """
    found: Signature = {}
    for root in capture.roots:
        record = capture.attributes_of(root)
        for name, value in zip(record.names, record.values, strict=True):
            try:
                found[f"{root.name}.{name}"] = _digest(_Tokens(capture, anchors, contents).of(value))
            except Exception as error:  # classes of the user's and of torch run code of their own, or refuse
                found[f"{root.name}.{name}"] = f"cannot be looked at ({type(error).__name__})"
    return found


def _digest(tokens: Iterator[str | bytes]) -> str:
    sha = hashlib.sha256()
    for token in tokens:
        sha.update(token if isinstance(token, bytes) else token.encode())
        sha.update(b"\0")
    return sha.hexdigest()[:16]


def digest_of(value: Any) -> str:
    """Return 16 hexadecimal digits of everything that a value leads to."""
    root = Root(SimpleNamespace(value=value), "it")
    anchors = Anchors({})
    return signature_of(Recorder(warn).take([root], anchors), anchors, contents=True)["it.value"]


def differences(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return the names of what differs between two signatures, or is in one of them only."""
    names = dict.fromkeys((*one, *other))
    return [name for name in names if one.get(name) != other.get(name)]


class _Tokens:
    """Describes what a value leads to, in the order in which it is met.

    The arguments are those of `signature_of`.
    """

    def __init__(self, capture: Capture, anchors: Anchors, contents: bool) -> None:
        self._capture, self._anchors, self._contents = capture, anchors, contents
        self._copies = {id(held.value): held_copy for held, held_copy in capture.copies}
        self._met: dict[int, int] = {}

    def of(self, value: Any) -> Iterator[str | bytes]:
        """Yield texts and bytes."""
        ahead = [value]
        while ahead:
            value = ahead.pop()
            key = id(value)
            if type(value) in ATOMS:
                yield f"{type(value).__name__} {value!r}" if self._contents else type(value).__name__
            elif key in self._anchors.names:
                yield f"@ {self._anchors.names[key]}"
            elif key in self._met:
                yield f"# {self._met[key]}"
            else:
                if kind_of(value) not in (Kind.ATOM, Kind.TUPLE):  # of which it does not matter who shares them
                    self._met[key] = len(self._met)
                yield f"{self._class_of(value)} {self._form(value)}"
                yield from self._content(value)
                ahead += [child for _, child in self._children(value)][::-1]

    def _class_of(self, value: Any) -> str:
        record = self._capture.records.get(id(value))
        return "iterator" if isinstance(record, Iterated) and record.rest is not None else describe(value)

    def _children(self, value: Any) -> list[tuple[str, Any]]:
        records = [self._capture.records.get(key) for key in (id(value), ~id(value))]
        if isinstance(records[0], Iterated) and records[0].repeats is not None:
            return [("", records[0].state[0])]
        if isinstance(records[0], Iterated) and records[0].rest is not None:
            return [("", item) for item in records[0].rest] if self._contents else []
        found = [child for record in records if record is not None for child in record.children()]
        if isinstance(value, Tensor):  # its form says whether it requires a gradient
            found = [(name, child) for name, child in found if name != f".{REQUIRES_GRAD}"]
        if found or kind_of(value) is not Kind.TUPLE:
            return found
        return [("", item) for item in base_of(value).__iter__(value)]

    def _form(self, value: Any) -> str:
        if isinstance(value, Tensor):
            # A tensor with a graph goes back without it. If that matters, a later loss or weight shows it.
            requires_grad = value.requires_grad and value.is_leaf
            if self._anchors.has_memory_of(value):
                memory = self._anchors.name_of_memory(value)
                return f"in {memory} {value.storage_offset()} {value.stride()} {requires_grad}"
            return f"{value.dtype} {tuple(value.shape)} {requires_grad}"
        if isinstance(value, np.ndarray):
            return f"{value.dtype} {value.shape}"
        record = self._capture.records.get(id(value))
        names = getattr(record, "names", None) or getattr(record, "keys", None)
        return " ".join(str(name) for name in names if isinstance(name, str)) if names else ""

    def _content(self, value: Any) -> Iterator[str | bytes]:
        if not self._contents:
            return
        kind, record = kind_of(value), self._capture.records.get(id(value))
        if kind is Kind.ATOM:
            yield repr(value)
        elif has_value(type(value)):
            yield repr(value_of(value))
        elif isinstance(value, Tensor):
            if not self._anchors.has_memory_of(value):
                yield _bytes_of(value, record, self._copies.get(id(value)))
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            yield np.ascontiguousarray(value).tobytes()
        elif record is not None:
            yield _text_of(record)


def _bytes_of(value: Tensor, record: Record | None, held: Any) -> bytes:
    content = record.content if isinstance(record, Graphed) else record.copy if isinstance(record, Content) else held
    content = plain_of(value) if content is None else content
    return plain.pack(content) if plain.is_plain(content) else repr(content).encode()


def _text_of(record: Record) -> str:
    if isinstance(record, Members):
        return " ".join(sorted(map(repr, record.members)))
    if isinstance(record, Randomness):
        return repr(record.state if not isinstance(record.state, Tensor) else record.state.tolist())
    if isinstance(record, Stream):
        return repr(record.content)
    if isinstance(record, (Bytes, Memory)):
        return repr(record.content)
    if isinstance(record, Iterated):
        if record.rest is not None:
            return ""
        return repr(record.state if isinstance(record.state, int) else record.repeats)
    return repr(probe(record.value)) if isinstance(record, Unknown) else ""
