"""What kind of state a value is, by its type.

Every value that is reachable from the roots has a kind, and every kind knows what it can do: it is copied and put back
in place, it cannot change, or it is opaque: then a change can at most be seen, and is reported by name.
"""

import array
import asyncio
import collections
import concurrent.futures
import contextlib
import contextvars
import copyreg
import ctypes
import datetime
import decimal
import enum
import fractions
import functools
import hashlib
import inspect
import io
import itertools
import logging
import multiprocessing.connection
import multiprocessing.process
import multiprocessing.queues
import multiprocessing.synchronize
import os
import pathlib
import pickle
import queue
import random
import re
import socket
import struct
import subprocess
import threading
import types
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from lightning_replica._compat import torch_jit
from lightning_replica._compat.lightning_names import FabricLogger, Strategy, pl
from lightning_replica._compat.packages import within_lightning
from lightning_replica._compat.torch import write_count
from lightning_replica.core.user_code import CACHE, module_of
from lightning_replica.state.atoms import ATOMS
from lightning_replica.state.objects.randomness import GENERATORS


class Kind(enum.Enum):
    """What a value is to the walk."""

    ATOM = "cannot change"
    TUPLE = "cannot change, but what it holds can"
    LIST = "list or deque"
    DICT = "dict"
    SET = "set"
    VIEW = "view of a mapping"
    TENSOR = "tensor"
    ARRAY = "array of NumPy"
    BYTES = "bytearray or array.array"
    MEMORY = "object of ctypes, as that of a `multiprocessing.Value`"
    STREAM = "io.BytesIO or io.StringIO"
    GENERATOR = "generator of random numbers"
    ITERATOR = "built-in iterator, which is made again"
    FUNCTION = "function, method or partial"
    CACHE = "function that caches what it returns"
    SCRIPT = "attributes of a module that torch.jit has compiled"
    CELL = "variable of a closure or a context"
    OBJECT = "attributes"
    REBUILT = "object in C, perhaps with attributes, which is made again of what it gives to pickle"
    OPAQUE = "nothing is known of its content"
    CLOSED = "other code restores it"


IN_C: Final = (types.BuiltinFunctionType, types.MethodWrapperType)
"""Functions and methods that are written in C."""

OF_CLASSES: Final = (staticmethod, classmethod, property)
"""What only bodies of classes hold."""

BOUND_TO: Final = ".__self__"
"""What `closure_of` calls the object of a method."""

VALUES: Final = (int, float, complex, str, bytes)

_IMMUTABLE: Final = (
    *(bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented), range, slice, type),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, np.dtype, np.generic, enum.Enum),
    *(pathlib.PurePath, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, decimal.Decimal),
    *(fractions.Fraction, uuid.UUID, re.Pattern, re.Match, struct.Struct, types.ModuleType, types.CodeType),
    *(types.GenericAlias, types.WrapperDescriptorType, types.MethodDescriptorType),
    *(np.ufunc, logging.Logger, torch.finfo, torch.iinfo),
)
_VALUES_BY_PICKLE: Final = (
    *(pathlib.PurePath, datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, fractions.Fraction),
    uuid.UUID,
)
# State that other code of this package restores, or that is no state of the training.
_CLOSED: Final = (
    *(Strategy, pl.Trainer, torch.distributed.ProcessGroup),
    *(torch.distributed.Store, torch.utils.hooks.RemovableHandle, *torch_jit.CONSTANT),
    *(type(threading.Lock()), type(threading.RLock()), threading.Condition),
    *(multiprocessing.synchronize.Lock, multiprocessing.synchronize.RLock, multiprocessing.synchronize.Condition),
)
# Tables, which may take more memory than there is for a copy; handlers and filters that are not the user's.
_IMMUTABLE_MODULES: Final = ("pyarrow.", "polars.", "logging.")
_LARGE_BYTES: Final = 2**24
_LARGE_MEMORY: Final = 2**20  # bytes of ctypes, which are compared in every snapshot
_CLOSED_MODULES: Final = ("lightning_replica.", "torch.distributed.", "torch._ops.", "_multiprocessing.")
_OPEN_MODULES: Final = ("torch.distributed.algorithms.", "torch.distributed.optim.")  # of those, what counts steps
_CLOSED_OF_LIGHTNING: Final = (
    *("accelerators.", "cli.", "connector.", "core.optimizer.", "fabric.", "loggers.", "loops.", "overrides."),
    *("plugins.", "profilers.", "serve.", "strategies.", "trainer.", "tuner.", "wrappers."),
    *("utilities.combined_loader.", "utilities.data."),
)
# Part of something that runs: to put its attributes back would break it.
LIVE: Final = (
    *(threading.Thread, socket.socket, io.IOBase, subprocess.Popen, multiprocessing.process.BaseProcess),
    *(queue.SimpleQueue, multiprocessing.queues.Queue, multiprocessing.queues.SimpleQueue),
    *(multiprocessing.connection.Connection, concurrent.futures.Future, asyncio.Future),
)
_COUNTED: Final = (multiprocessing.synchronize.SemLock,)  # semaphores, also of events
_CTYPES: Final = (ctypes.Array, ctypes.Structure, ctypes.Union, ctypes._SimpleCData)
_POINTERS: Final = "PzZOX"  # codes of the types of ctypes that hold addresses
_STREAMS: Final = (io.BytesIO, io.StringIO)
_ITERATORS: Final[tuple[type, ...]] = (
    *(type(iter([])), type(iter(())), type(iter(range(0))), type(iter(range(2**70))), type(iter("")), type(iter(b""))),
    *(type(iter({})), type(iter({}.values())), type(iter({}.items())), type(iter(set())), type(iter(bytearray()))),
    *(type(iter(collections.deque())), type(reversed(collections.deque())), type(iter(int, 1))),
    *(type(reversed([])), type(reversed({})), enumerate, zip, map, filter, reversed),
)
# Until Python 3.14 they can be made again.
ITERTOOLS: Final = tuple(each for each in vars(itertools).values() if isinstance(each, type))
_ITERTOOLS_THAT_REDUCE: Final = tuple(each for each in ITERTOOLS if "__reduce__" in vars(each))

VIEWS: Final[Mapping[type, Callable[[Any], Any]]] = {
    types.MappingProxyType: types.MappingProxyType,
    **{type(make({})): make for make in (dict.keys, dict.values, dict.items)},
}
"""How views of a mapping are made, by their class."""

# They hold no state of the training, or none that a result depends on.
HARMLESS: Final = (
    *(weakref.ReferenceType, weakref.ProxyType, weakref.CallableProxyType),
    *(types.TracebackType, types.FrameType, types.GetSetDescriptorType),
    *(type(ctypes.pythonapi.Py_IncRef).__mro__[1], torch.Event),
)
# Of packages that may not be installed, or do not export them: the package and the name.
_HARMLESS_NAMES: Final = frozenset(
    (("pandas", "BlockValuesRefs"), ("pandas", "NAType"), ("numpy", "_ArrayFunctionDispatcher"), ("ssl", "SSLContext"))
)

_GENERATOR_STATES: Final = {inspect.GEN_CREATED: 0, inspect.GEN_CLOSED: 1}
_FOR_PICKLE: Final = ("__reduce__", "__reduce_ex__", "__getstate__")
_ATTRIBUTES_SUFFICE: Final = (BaseException, threading.local)
_NOT_SLOTS: Final = ("__dict__", "__weakref__")
_NO_FIELDS: Final = ("__dict__", "__traceback__", "obj")  # the last refers to whatever lacked an attribute
_POINTER_BYTES: Final = ctypes.sizeof(ctypes.c_void_p)
_HEAP_TYPE: Final = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_slots: dict[type, tuple[str, ...]] = {}
_known: dict[type, Kind] = dict.fromkeys(ATOMS, Kind.ATOM)


def kind_of(value: Any) -> Kind:
    """Return the kind of a value."""
    cls = type(value)
    kind = _known.get(cls)
    if kind is None:
        kind = _known[cls] = kind_of_class(cls)
    if kind is Kind.MEMORY and (ctypes.sizeof(value) > _LARGE_MEMORY or holds_addresses(cls)):
        return Kind.OPAQUE
    return Kind.OPAQUE if kind in (Kind.OBJECT, Kind.REBUILT) and is_live(value) else kind


def kind_of_class(cls: type) -> Kind:
    """Return the kind of the instances of a class."""
    if has_value(cls):
        return Kind.OBJECT
    if issubclass(cls, _VALUES_BY_PICKLE) and cls.__dictoffset__ != 0 and not is_of_pandas(cls):
        return Kind.REBUILT  # the user's, with attributes
    if issubclass(cls, np.void):  # a row whose fields can be written to
        return Kind.OPAQUE
    for kind, classes in _BY_CLASS:
        if issubclass(cls, classes):
            return kind
    module = cls.__module__ + "."
    if within_lightning(module).startswith(_CLOSED_OF_LIGHTNING):
        return Kind.CLOSED
    if issubclass(cls, nn.Module | pl.Callback | pl.LightningDataModule):
        return Kind.OBJECT
    if module.startswith(_IMMUTABLE_MODULES):
        return Kind.ATOM
    if _is_remote(cls):
        return Kind.OPAQUE
    if module.startswith(_CLOSED_MODULES) and not module.startswith(_OPEN_MODULES):
        return Kind.CLOSED
    if derives_attributes(cls):
        return Kind.REBUILT
    if cls.__dictoffset__ != 0 or slots_of(cls):
        return Kind.REBUILT if has_content_in_c(cls) else Kind.OBJECT
    return Kind.REBUILT if gives_parts(cls) else Kind.OPAQUE


def is_of_pandas(cls: type) -> bool:
    """Return whether a class is one of pandas'."""
    return module_of(cls).partition(".")[0] == "pandas"


def derives_attributes(cls: Any) -> bool:
    """Return whether instances of a class consist of what they give to pickle, and derive all else from that."""
    return is_of_pandas(cls) and cls.__reduce__ is not object.__reduce__


def gives_parts(cls: type) -> bool:
    """Return whether a class says otherwise than `object` does how pickle may take its instances apart."""
    own = (getattr(cls, name, None) is not getattr(object, name, None) for name in _FOR_PICKLE)
    return cls in copyreg.dispatch_table or any(own)


def has_content_in_c(cls: Any) -> bool:
    """Return whether instances of a class take more memory than their attributes and slots: something in C."""
    if issubclass(cls, _ATTRIBUTES_SUFFICE) or module_of(cls).startswith("torch."):
        return False
    while cls is not object:
        base = cls.__base__
        slots = vars(cls).get("__slots__", ())
        named = [each for each in ((slots,) if isinstance(slots, str) else slots) if each not in _NOT_SLOTS]
        known = len(named) + (cls.__dictoffset__ > 0 and base.__dictoffset__ == 0)
        known += cls.__weakrefoffset__ > 0 and base.__weakrefoffset__ == 0
        if cls.__basicsize__ - base.__basicsize__ > known * _POINTER_BYTES:
            return True
        cls = base
    return False


def is_harmless(cls: type) -> bool:
    """Return whether instances of a class hold no state of the training, or none that a result depends on."""
    if issubclass(cls, HARMLESS):
        return True
    named = [(module_of(base).partition(".")[0], base.__name__) for base in cls.__mro__]
    return any(each in _HARMLESS_NAMES or each[0].startswith("_cython_") for each in named)  # functions of Cython


def is_made_in_python(cls: type) -> bool:
    """Return whether a class was made by a class statement, and not in C."""
    return bool(cls.__flags__ & _HEAP_TYPE)


def has_value(cls: type) -> bool:
    """Return whether instances of a class are numbers or texts that may have attributes, too."""
    if not issubclass(cls, VALUES) or cls in VALUES or issubclass(cls, enum.Enum):
        return False
    return cls.__dictoffset__ != 0 or bool(slots_of(cls))


def value_of(value: Any) -> Any:
    """Return the number or text that an instance of a class with `has_value` is, without its class."""
    if isinstance(value, (str, bytes)):
        base: Any = str if isinstance(value, str) else bytes
        return base.__getitem__(value, slice(None))
    base = next(each for each in VALUES if isinstance(value, each))
    return base.__pos__(value)


_BY_CLASS: Final[tuple[tuple[Kind, tuple[type, ...]], ...]] = (
    (Kind.OPAQUE, (weakref.ProxyType, weakref.CallableProxyType)),  # first: any question goes to what they stand for
    (Kind.CLOSED, _CLOSED),
    (Kind.ATOM, (random.SystemRandom,)),
    (Kind.TENSOR, (Tensor,)),
    (Kind.ATOM, _IMMUTABLE),
    (Kind.TUPLE, (tuple, frozenset)),
    (Kind.LIST, (list, collections.deque)),
    (Kind.DICT, (dict,)),
    (Kind.SET, (set,)),
    (Kind.VIEW, tuple(VIEWS)),
    (Kind.ARRAY, (np.ndarray,)),
    (Kind.BYTES, (bytearray, array.array)),
    (Kind.MEMORY, _CTYPES),
    (Kind.OPAQUE, (ctypes._Pointer,)),
    (Kind.STREAM, _STREAMS),
    (Kind.GENERATOR, GENERATORS),
    (Kind.ITERATOR, (*_ITERATORS, *_ITERTOOLS_THAT_REDUCE)),
    (Kind.FUNCTION, (types.FunctionType, types.MethodType, *IN_C, functools.partial)),
    (Kind.FUNCTION, OF_CLASSES),
    (Kind.CACHE, (CACHE,)),
    (Kind.SCRIPT, (torch_jit.SCRIPT,)),
    (Kind.CELL, (types.CellType, contextvars.ContextVar)),
    (Kind.OBJECT, (threading.local,)),  # what it holds for the thread that trains
    (Kind.OPAQUE, (decimal.Context,)),  # the one of a thread stays the same object
    (Kind.OBJECT, (logging.LoggerAdapter,)),
    (Kind.OPAQUE, (FabricLogger,)),  # those of the trainer are anchors
    (Kind.OPAQUE, (torch.UntypedStorage, torch.TypedStorage)),  # not compared, as tensors are
    (Kind.OPAQUE, (*_COUNTED, *LIVE, *ITERTOOLS)),
    (Kind.OPAQUE, (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)),
)


def _is_remote(cls: type) -> bool:
    """Return whether instances stand for something in another process, as those of a `multiprocessing.Manager`."""
    return any(base.__module__ == "multiprocessing.managers" for base in cls.__mro__)


def holds_addresses(cls: Any) -> bool:
    """Return whether objects of a class of ctypes hold addresses, which mean nothing later or elsewhere."""
    if issubclass(cls, ctypes._SimpleCData):
        return cls._type_ in _POINTERS
    if issubclass(cls, ctypes.Array):
        return holds_addresses(cls._type_)
    if issubclass(cls, (ctypes.Structure, ctypes.Union)):
        parts = [part for base in cls.__mro__ for part in vars(base).get("_fields_", ())]
        return any(holds_addresses(part[1]) for part in parts)
    return True


def keeps_something(function: types.FunctionType) -> bool:
    """Return whether a function has variables of a closure, attributes, or a default value that can change.

    A function that names itself may give itself attributes.
    """
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    closure = set(function.__code__.co_freevars) - {"__class__"}
    attributes = vars(function) or function.__name__ in function.__code__.co_names
    return bool(closure or attributes) or any(kind_of(value) is not Kind.ATOM for value in defaults)


def is_exchanged_only(value: Any) -> bool:
    """Return whether a function, also one in a static method or a property, keeps nothing: it can only be exchanged."""
    inner = wrapped_in(value)
    return type(inner) is types.FunctionType and not keeps_something(inner)


def wrapped_in(value: Any) -> Any:
    """Return the function in a static method, a class method or a property; all else as it is."""
    if isinstance(value, property):
        return value.fget
    return value.__func__ if isinstance(value, (staticmethod, classmethod)) else value


def has_attributes(value: Any) -> bool:
    """Return whether an object has a ``__dict__``; ``hasattr`` would ask the user's ``__getattr__``."""
    cls = type(value)
    return cls.__dictoffset__ != 0 or issubclass(cls, threading.local)  # which has one for each thread


def is_live(value: Any) -> bool:
    """Return whether an object holds a thread, a process or the like: it is part of something that runs."""
    attributes = [*vars(value).values()] if has_attributes(value) else []
    return not isinstance(value, nn.Module) and any(map(_runs, attributes))


def _runs(value: Any) -> bool:
    return isinstance(value, LIVE) and not isinstance(value, io.IOBase)


def is_file(value: Any) -> bool:
    """Return whether a value is a file; the one that an attribute held before may be closed by now."""
    cls = type(value)  # a proxy would be asked for what it stands for
    return issubclass(cls, io.IOBase) and not issubclass(cls, _STREAMS)


def slots_of(cls: type) -> tuple[str, ...]:
    """Return the names of the slots that instances of a class written in Python have, and of fields of exceptions."""
    if cls not in _slots:
        _slots[cls] = _find_slots(cls)
    return _slots[cls]


def _find_slots(cls: type) -> tuple[str, ...]:
    found: list[str] = []
    for base in cls.__mro__:
        slots = vars(base).get("__slots__", ())
        if issubclass(base, BaseException) and not is_made_in_python(base):
            found += sorted((name for name, each in vars(base).items() if _is_field(name, each)), key=_last_of_fields)
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            if name not in _NOT_SLOTS:
                hidden = name.startswith("__") and not name.endswith("__")
                found.append(f"_{base.__name__.lstrip('_')}{name}" if hidden else name)
    return tuple(found)


def _is_field(name: str, of_class: Any) -> bool:
    """Return whether an attribute of a built-in class of exceptions is a field that can be set, as ``args``."""
    is_field = isinstance(of_class, (types.MemberDescriptorType, types.GetSetDescriptorType))
    return is_field and name not in _NO_FIELDS


def _last_of_fields(name: str) -> bool:
    """Put the field last that `__cause__` sets as well."""
    return name == "__suppress_context__"


def reduced(iterator: Any) -> tuple[Any, tuple[Any, ...], Any]:
    """Return a function, its arguments and a state, which make an iterator that has come as far."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        function, arguments, *state = iterator.__reduce__()
    return function, arguments, state[0] if state else None


def iterator_of(function: Any, arguments: Iterable[Any], state: Any) -> Any:
    """Return the iterator that `reduced` has described."""
    made = function(*arguments)
    if state is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            made.__setstate__(state)
    return made


def probe(value: Any) -> Any:
    """Return something that shows whether an opaque value has changed; None if nothing does."""
    if issubclass(type(value), (weakref.ProxyType, weakref.CallableProxyType)):
        return None
    if isinstance(value, types.GeneratorType):  # between two items, nothing shows which one is next
        return _GENERATOR_STATES.get(inspect.getgeneratorstate(value))
    if isinstance(value, ITERTOOLS):
        return repr(value) if " at 0x" not in repr(value) else None
    if isinstance(value, Tensor):
        return "lazy" if nn.parameter.is_lazy(value) else write_count(value)
    if isinstance(value, _COUNTED):
        return value._semlock._get_value()  # type: ignore[attr-defined]
    if isinstance(value, queue.SimpleQueue):
        return 0 if value.empty() else None
    if type(value).__module__ == "sqlite3" and hasattr(value, "total_changes"):
        return _changes_in_memory(value)
    if isinstance(value, io.IOBase):
        with contextlib.suppress(OSError, ValueError):
            return value.tell(), _stamp_of(value)
    return None


def _stamp_of(file: Any) -> Any:
    """Return the size of a file, and when it was last written to; None of a stream without a file."""
    with contextlib.suppress(OSError, ValueError):
        found = os.fstat(file.fileno())
        return found.st_size, found.st_mtime_ns
    return None


def _changes_in_memory(connection: Any) -> Any:
    """Return how many rows were written through a connection of SQLite; None if they are in a file."""
    with contextlib.suppress(Exception):  # of another thread, or closed
        if not any(file for *_, file in connection.execute("PRAGMA database_list")):
            return connection.total_changes
    return None


def pickled_digest(value: Any) -> bytes | None:
    """Return a digest of what an opaque value is pickled as; None if it is large, or cannot be pickled."""
    if _is_remote(type(value)) or issubclass(type(value), (*_CTYPES, ctypes._Pointer, FabricLogger)):
        return None  # a logger of Weights & Biases would begin a run
    try:
        if getattr(value, "nbytes", 0) > _LARGE_BYTES:
            return None
        beside: list[pickle.PickleBuffer] = []
        pickled = pickle.dumps(value, protocol=5, buffer_callback=beside.append)
        parts: list[bytes | memoryview] = [pickled, *(each.raw() for each in beside)]
        if sum(map(len, parts)) > _LARGE_BYTES:
            return None
        found = hashlib.sha256()
        for part in parts:
            found.update(part)
        return found.digest()
    except Exception:  # any code may run
        return None


def describe(value: Any) -> str:
    """Return the type of a value, for messages."""
    cls = type(value)
    return cls.__qualname__ if cls.__module__ in ("builtins", "__main__") else f"{cls.__module__}.{cls.__qualname__}"


def attributes_of_partial(function: functools.partial[Any]) -> dict[str, Any] | None:
    """Return the attributes of a partial; None if it has none.

    ``vars`` would give it an empty dict, and Python does not join partials of a partial that has one.
    """
    state: Any = functools.partial.__reduce__(function)[2]
    found: dict[str, Any] | None = state[3]
    return found


def closure_of(function: Any) -> Iterable[tuple[str, Any]]:
    """Yield what a function keeps: variables of its closure, defaults, attributes; the object of a method."""
    if isinstance(function, types.MethodType):
        yield BOUND_TO, function.__self__
        yield from closure_of(function.__func__)
    elif isinstance(function, IN_C):
        if not isinstance(function.__self__, (types.ModuleType, type(None))):
            yield BOUND_TO, function.__self__
    elif isinstance(function, (staticmethod, classmethod)):
        yield ".__func__", function.__func__
    elif isinstance(function, property):
        yield ".fget", function.fget
    elif isinstance(function, functools.partial):
        yield ".func", function.func
        yield ".args", function.args
        yield ".keywords", function.keywords
        yield ".__dict__", attributes_of_partial(function)
    elif isinstance(function, types.FunctionType):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            yield f".<{name}>", cell
        yield ".__defaults__", function.__defaults__
        yield ".__kwdefaults__", function.__kwdefaults__
        yield ".__dict__", vars(function)
