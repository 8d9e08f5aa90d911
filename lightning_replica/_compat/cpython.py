"""What CPython keeps of built-in objects and does not tell, and what is wrong with some of its versions.

[Note: forks that hang]
In Python before 3.10.15, and in 3.11.7 and earlier versions of 3.11, a process that is forked while another thread
begins to use Python waits for ever, in the fork, for a lock that the other thread held (python/cpython#112275).
Threads of gloo begin to use Python when they drop the last reference to a tensor, so a worker of a DataLoader may
hang, and torch waits for it. Later versions make the lock anew in the child before they use it. So does `mend_forks`;
where that is done already, it does no harm.
"""

import ctypes
import os
import sys
from functools import partial
from threading import get_ident
from typing import Any, Final

# What `_PyRuntime` begins with in versions whose forks may hang. An address and the lock follow.
_FLAGS: Final = {(3, 10): (0, 1, 1, 1), (3, 11): (1, 0, 1, 1, 1)}
_mended: list[Any] = []  # what the C library calls, which nothing else refers to

# Of a set, behind the head of every object: how many slots are filled, and used, a mask, the table, a hash, a finger.
_FINGER: Final = object.__basicsize__ + 5 * ctypes.sizeof(ctypes.c_ssize_t)


def place_of_next(value: set[Any]) -> int:
    """Return where `set.pop` goes on in the table of a set; 0 if it has taken no member yet."""
    return _finger(value) if _IS_KNOWN else 0


def _finger(value: set[Any]) -> int:
    return ctypes.c_ssize_t.from_address(id(value) + _FINGER).value


def _is_known() -> bool:
    """Return whether this Python has a set's finger where it is looked for."""
    if set.__basicsize__ < _FINGER + ctypes.sizeof(ctypes.c_ssize_t):
        return False
    new = {1, 2, 3}
    before = _finger(new)
    popped = [new.pop(), new.pop()]
    return before == 0 and _finger(new) == popped[-1] + 1


_IS_KNOWN: Final = _is_known()


def mend_forks() -> bool:
    """Keep forks of this process from hanging, and return whether they end now. See [Note: forks that hang].

    False if this version may have the fault, and the lock is not found, or the C library is not glibc.
    """
    if sys.version_info[:2] not in _FLAGS or _mended:
        return True
    lock, libc = _lock_of_threads(), ctypes.PyDLL(None)
    if lock is None or not hasattr(libc, "__register_atfork"):
        return False
    api = ctypes.pythonapi
    api.PyThread_allocate_lock.restype = ctypes.c_void_p
    spare = ctypes.c_void_p(api.PyThread_allocate_lock())  # the parent never takes it, so it is free in every child
    copy, register, unregister = libc.memmove, libc["__register_atfork"], libc["__cxa_finalize"]
    copy.argtypes, copy.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], None
    register.argtypes, unregister.argtypes = [ctypes.c_void_p] * 4, [ctypes.c_void_p]
    # No line of Python may run in the child by then: the interpreter would wait for threads that are not there.
    mend = ctypes.PYFUNCTYPE(None)(partial(copy, ctypes.addressof(lock), ctypes.addressof(spare), ctypes.sizeof(lock)))

    # Only while Python forks: in a fork by another library's thread, `mend` would wait for the interpreter for ever.
    # The address of the thread stands for a library, whose handlers are removed together.
    def before() -> None:
        register(None, None, ctypes.cast(mend, ctypes.c_void_p), get_ident())

    def after() -> None:
        unregister(get_ident())

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=after)
    _mended.extend((mend, spare))
    return True


def _lock_of_threads() -> ctypes.c_void_p | None:
    """Return where the address of the lock stands; None if `_PyRuntime` does not look as expected."""
    flags = _FLAGS.get(sys.version_info[:2])
    if flags is None or not hasattr(ctypes.pythonapi, "_PyRuntime"):
        return None
    start = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))
    size = ctypes.sizeof(ctypes.c_void_p)
    end = -(-ctypes.sizeof(ctypes.c_int) * len(flags) // size) * size
    found = tuple((ctypes.c_int * len(flags)).from_address(start))
    finalizing = ctypes.c_void_p.from_address(start + end).value
    lock = ctypes.c_void_p.from_address(start + end + size)
    return lock if found == flags and finalizing is None and lock.value is not None else None
