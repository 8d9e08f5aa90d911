"""The host's memory and random generators, which every rank has, whatever its device is."""

import ctypes
import random
import struct
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

HOST = torch.device("cpu")

_SIZES = struct.Struct("<qq")  # sizes of torch's and numpy's records
_NUMPY = struct.Struct("<qqd")
_WORDS = 624
_PYTHON = struct.Struct("<q?d625q")


def on_host(tensor: Tensor) -> bool:
    """Return whether a tensor lies in the host's memory."""
    return tensor.is_cpu


class _NumpyGenerator:
    """numpy's global generator.

    numpy takes 40 µs to return the state, longer than all other generators. Most runs seed it and never use it. So its
    words are read where they lie, and while they are those of a generator that has only been seeded, one record serves
    all readings. Other words do not tell whether the generator keeps the second of a pair of normal numbers
    (tests/devices/test_host.py::test_what_numpy_has_drawn_is_seen).
    """

    def __init__(self) -> None:
        self._seeded = b"", b""  # words and record

    def state(self) -> bytes:
        """Return the record of the state."""
        words = self._words()
        if words and words == self._seeded[0]:
            return self._seeded[1]
        _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
        record = _NUMPY.pack(position, has_gauss, gauss) + np.asarray(keys, dtype=np.uint32).tobytes()
        if not has_gauss and _is_only_seeded(int(position), [int(key) for key in keys[:3]]):
            self._seeded = words, record
        return record

    def set_state(self, record: bytes) -> None:
        """Restore the state that a record holds."""
        position, has_gauss, gauss = _NUMPY.unpack_from(record)
        keys = np.frombuffer(record[_NUMPY.size :], dtype=np.uint32)
        np.random.set_state(("MT19937", keys, position, has_gauss, gauss))

    def _words(self) -> bytes:
        """Return numpy's ``mt19937_state``: 624 words and the position; nothing if it is another generator."""
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if not isinstance(generator, np.random.MT19937):
            return b""
        return ctypes.string_at(generator.ctypes.state_address, 4 * _WORDS + 4)


def _is_only_seeded(position: int, words: Sequence[int]) -> bool:
    """Return whether numpy's generator has drawn nothing since it was seeded (``mt19937_seed``, ``init_by_array``)."""
    if words[0] == 0x80000000:
        return position in (_WORDS, _WORDS - 1)
    steps = (1812433253 * (word ^ word >> 30) + number & 0xFFFFFFFF for number, word in enumerate(words[:2], 1))
    return position == _WORDS and [*steps] == words[1:]


_numpy = _NumpyGenerator()


def rng_state() -> bytes:
    """Return the state of the generators of torch (CPU), numpy and python, in a few fixed-size records."""
    torch_state = torch.get_rng_state().numpy().tobytes()
    numpy_state = _numpy.state()
    version, internal, gauss_next = random.getstate()
    python_state = _PYTHON.pack(version, gauss_next is not None, gauss_next or 0.0, *internal)
    return _SIZES.pack(len(torch_state), len(numpy_state)) + torch_state + numpy_state + python_state


def set_rng_state(state: bytes) -> None:
    """Restore what `rng_state` returned; ignore what a device has added to it."""
    torch_size, numpy_size = _SIZES.unpack_from(state)
    numpy_start = _SIZES.size + torch_size
    python_start = numpy_start + numpy_size
    torch.set_rng_state(torch.frombuffer(bytearray(state[_SIZES.size : numpy_start]), dtype=torch.uint8))
    _numpy.set_state(state[numpy_start:python_start])
    version, has_next, gauss_next, *internal = _PYTHON.unpack_from(state, python_start)
    random.setstate((version, tuple(internal), gauss_next if has_next else None))


def added_to(state: bytes) -> bytes:
    """Return the part of ``state`` that a device has added to `rng_state`."""
    torch_size, numpy_size = _SIZES.unpack_from(state)
    return state[_SIZES.size + torch_size + numpy_size + _PYTHON.size :]


def transfer_buffer(size_bytes: int) -> Tensor:
    """Return memory of the host; if there is a device, the memory is pinned, so that copies are fast."""
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=torch.accelerator.is_available())


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two contiguous tensors of one dtype have the same bits.

    On CPU this is 2.5 times as fast as ``torch.equal``.
    """
    if not on_host(a):
        return same_bytes(a, b)
    return a.nbytes == b.nbytes and _memcmp(a.data_ptr(), b.data_ptr(), a.nbytes) == 0


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Do what `same_bits` does, on any device. ``torch.equal`` on values would not do: 0.0 == -0.0, and NaN != NaN."""
    return torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memcmp.restype = ctypes.c_int
