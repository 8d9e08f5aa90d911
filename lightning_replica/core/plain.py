"""The format of what ranks send each other: plain data and tensors as bytes that can be read without running code.

There are two formats. `pack` is for data that is packed twice a step: JSON, followed by the memory of tensors and
bytes. As `Pieces`, the bytes that were given stay the same objects, so that who has sent them need not do so again.
`save` is ``torch.save``, which supports more types, read with ``weights_only=True``. Neither reader unpickles freely,
so bytes from outside cannot make code run.
"""

import collections
import datetime
import io
import json
import math
import pathlib
import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_replica._compat.torch import as_bytes
from lightning_replica.devices.host import HOST, on_host
from lightning_replica.errors import ConfigurationError, TransferError

_HEAD = struct.Struct("<4sqq")  # magic with the version of the format, length of the JSON, length of what follows
_MAGIC = b"LRP1"
_MARK = "!"  # the key of a JSON object that represents a value of a type that JSON does not have
_MARKED = json.dumps({_MARK: 0})[1:-2]
_AS_THEY_ARE = frozenset((str, int, bool, type(None)))
_STRINGS = frozenset((str,))

# Types that `save` accepts besides tensors and containers. None of these runs code when it is read.
_SAFE: list[Any] = [
    pathlib.PosixPath,
    pathlib.WindowsPath,
    pathlib.PurePosixPath,
    datetime.datetime,
    datetime.date,
    datetime.timedelta,
    datetime.timezone,
    collections.deque,
    np.ndarray,
    np.dtype,
    np.empty(0).__reduce__()[0],
    np.float64(0).__reduce__()[0],
    *{type(np.dtype(code)) for code in "?bBhHiIlLqQefdgFDGSUmM"},
]


class NotPlainError(ConfigurationError):
    """A value cannot be sent to another rank. The message names the type that prevents it."""


class Pieces:
    """Bytes in pieces, which can be packed like bytes.

    Attributes:
        parts: The pieces. Some may be the same objects as in the pieces of an earlier time.
    """

    __slots__ = ("parts",)

    def __init__(self, parts: Iterable[bytes] = ()) -> None:
        self.parts = tuple(parts)

    def __bool__(self) -> bool:
        return any(self.parts)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __bytes__(self) -> bytes:
        return b"".join(self.parts)


_BYTES: Final = frozenset((bytes, Pieces))


def pack(value: Any) -> bytes:
    """Return ``value`` as bytes: plain data, numbers of NumPy, dense tensors, lists, tuples and dicts of these.

    Every bit is preserved, including those of a NaN. `unpack` returns tensors on the CPU unless ``placed`` is true.

    Raises:
        NotPlainError: If ``value`` contains anything else.
    """
    blobs: list[Any] = []
    return b"".join(_parts(json.dumps(_to_json(value, blobs)).encode(), blobs))


def pack_in_pieces(value: Any) -> Pieces:
    """Return what `pack` does, in pieces: bytes and `Pieces` in ``value`` are pieces of it."""
    blobs: list[Any] = []
    return _in_pieces(json.dumps(_to_json(value, blobs)).encode(), blobs)


def pack_lists(value: Any) -> bytes:
    """Return ``value`` as bytes like `pack`, in a third of the time. It must have no tuples, and only string keys.

    `unpack` would return tuples as lists, and numeric keys as strings.
    """
    return bytes(pack_lists_in_pieces(value))


def pack_lists_in_pieces(value: Any) -> Pieces:
    """Return what `pack_lists` does, in pieces."""
    blobs: list[Any] = []
    marks = 0

    def add(found: Any) -> Any:
        nonlocal marks
        node = _to_json(found, blobs)
        marks += 1 if type(found) in _BYTES else json.dumps(node).count(_MARKED)
        return node

    text = json.dumps(value, default=add, check_circular=False)
    # A dict of the user's may have the mark as a key. In a string of the user's, quotes are escaped.
    if "NaN" in text or text.count(_MARKED) != marks:
        return pack_in_pieces(value)
    return _in_pieces(text.encode(), blobs)


def _parts(text: bytes, blobs: list[Any]) -> list[Any]:
    return [_HEAD.pack(_MAGIC, len(text), sum(map(len, blobs))), text, *blobs]


def _in_pieces(text: bytes, blobs: list[Any]) -> Pieces:
    # The memory of a tensor may be written to later.
    return Pieces(part if type(part) is bytes else bytes(part) for part in _parts(text, blobs))


def unpack(data: bytes, placed: bool = False) -> Any:
    """Return the value that `pack` was given.

    Args:
        data: The bytes that `pack` returned.
        placed: Whether tensors that lay on a device are moved to this rank's device. Otherwise, all are on the host.

    Raises:
        TransferError: If ``data`` does not have the format of this version's `pack`.
    """
    if len(data) < _HEAD.size:
        raise TransferError(f"Received {len(data)} bytes where packed data was expected.")
    magic, length, rest = _HEAD.unpack_from(data)
    if magic != _MAGIC or len(data) != _HEAD.size + length + rest:
        raise TransferError(
            f"Data begins with {magic!r} and has {len(data)} bytes; {_MAGIC!r} and"
            f" {_HEAD.size + length + rest} bytes were expected."
        )
    try:
        tree = json.loads(data[_HEAD.size : _HEAD.size + length])
        return _from_json(tree, memoryview(data)[_HEAD.size + length :], own_device() if placed else HOST)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, struct.error) as error:
        raise TransferError(f"Packed data cannot be read: {type(error).__name__}: {error}") from error


def _to_json(value: Any, blobs: list[Any]) -> Any:
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind is float:
        return value if not math.isnan(value) else {_MARK: "nan", "bits": struct.pack("<d", value).hex()}
    if kind is dict:
        if _MARK not in value and {*map(type, value)} <= _STRINGS:
            return {key: item if type(item) in _AS_THEY_ARE else _to_json(item, blobs) for key, item in value.items()}
        items = [[_to_json(key, blobs), _to_json(item, blobs)] for key, item in value.items()]
        return {_MARK: "dict", "items": items}
    if kind is list:
        return [_to_json(item, blobs) for item in value]
    if kind is tuple:
        return {_MARK: "tuple", "items": [_to_json(item, blobs) for item in value]}
    if kind is bytes:
        blobs.append(value)
        return {_MARK: "bytes", "size": len(value)}
    if kind is Pieces:
        blobs += value.parts
        return {_MARK: "bytes", "size": len(value)}
    if isinstance(value, Tensor) and is_plain(value):
        return _tensor_to_json(value, blobs)
    if isinstance(value, np.generic) and value.dtype.kind in "biufcmM" and kind is np.dtype(value.dtype.str).type:
        return {_MARK: "number", "dtype": value.dtype.str, "bits": value.tobytes().hex()}
    raise NotPlainError(f"it holds a {kind.__module__}.{kind.__qualname__}")


def is_plain(tensor: Tensor) -> bool:
    """Return whether `pack` accepts a tensor: it is dense, not quantized, and not on the meta device."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta


def _tensor_to_json(value: Tensor, blobs: list[Any]) -> dict[str, Any]:
    flat = value.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
    blob = as_bytes(flat) if flat.numel() else b""
    blobs.append(blob)
    node = {_MARK: "tensor", "dtype": str(value.dtype)[6:], "shape": list(value.shape), "size": len(blob)}
    return node if on_host(value) else {**node, "away": True}


def _from_json(tree: Any, blobs: memoryview, device: torch.device) -> Any:
    """Decode ``tree``, which refers to the blobs in their order. Tensors that lay on a device go to ``device``."""
    start = 0

    def take(size: int) -> bytes:
        nonlocal start
        if size < 0 or start + size > len(blobs):
            raise ValueError(f"{size} bytes asked for, {len(blobs) - start} left")
        start += size
        return bytes(blobs[start - size : start])

    def walk(node: Any) -> Any:
        if isinstance(node, list):
            return [walk(item) for item in node]
        if not isinstance(node, dict):
            return node
        if _MARK not in node:
            return {key: walk(item) for key, item in node.items()}
        value = _READERS[node[_MARK]](node, walk, take)
        return value.to(device) if "away" in node else value

    return walk(tree)


def _read_tensor(node: dict[str, Any], _: Any, take: Callable[[int], bytes]) -> Tensor:
    dtype = getattr(torch, node["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{node['dtype']!r} is not a dtype")
    data = take(node["size"])
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.view(node["shape"])


_Reader: TypeAlias = Callable[[dict[str, Any], Callable[[Any], Any], Callable[[int], bytes]], Any]
_READERS: dict[str, _Reader] = {
    "nan": lambda node, walk, take: struct.unpack("<d", bytes.fromhex(node["bits"]))[0],
    "dict": lambda node, walk, take: {walk(key): walk(item) for key, item in node["items"]},
    "tuple": lambda node, walk, take: tuple(walk(item) for item in node["items"]),
    "bytes": lambda node, walk, take: take(node["size"]),
    "tensor": _read_tensor,
    "number": lambda node, walk, take: np.frombuffer(bytes.fromhex(node["bits"]), node["dtype"])[0],
}


def save(value: Any, also: Sequence[type] = ()) -> bytes:
    """Return ``value`` as ``torch.save`` writes it, if `load` can read it.

    Args:
        value: Tensors, arrays, plain data, paths, times, and containers of these.
        also: Further types that ``value`` may contain.

    Raises:
        NotPlainError: If ``value`` contains an object of a type that is not known to be safe.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception as error:  # of any class: a type of the user's may raise anything when it is pickled
        raise NotPlainError(f"it cannot be saved ({type(error).__name__}: {error})") from error
    buffer.seek(0)
    with safe_types(also):
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(buffer)
    if unsafe:
        raise NotPlainError(f"it holds {', '.join(sorted(unsafe))}")
    return buffer.getvalue()


def safe_types(also: Sequence[type] = ()) -> AbstractContextManager[Any]:
    """Return a block in which ``torch.load`` with ``weights_only=True`` reads what `save` accepts."""
    return torch.serialization.safe_globals([*_SAFE, *also])


def load(data: bytes, also: Sequence[type] = ()) -> Any:
    """Return the value that `save` was given, with the same ``also``; run no code that ``data`` names.

    Tensors that lay on another rank's device are moved to this rank's device.

    Raises:
        TransferError: If ``data`` contains a type that `save` refuses, or is damaged.
    """
    with safe_types(also):
        try:
            return torch.load(io.BytesIO(data), map_location=_own_place, weights_only=True)
        except Exception as error:
            raise TransferError(f"The received data cannot be read: {str(error).splitlines()[0]}") from error


def _own_place(storage: Any, place: str) -> Any:
    """Move a storage, which was read into the host's memory, to this rank's device if it lay on one when saved."""
    own = own_device()
    if place == HOST.type or own == HOST:
        return storage
    return torch.serialization.default_restore_location(storage, str(own))


def own_device() -> torch.device:
    """Return this rank's device for tensors that lay on another rank's device; the host if there is no device."""
    if not torch.accelerator.is_available():
        return HOST
    return torch.device(f"{torch.accelerator.current_accelerator()}:{torch.accelerator.current_device_index()}")
