"""What is done about faults of CPython."""

import subprocess
import sys

import pytest

from lightning_replica._compat import cpython
from lightning_replica._compat.cpython import _FLAGS

FORKS = """
import ctypes, os, subprocess, sys, threading
from lightning_replica._compat.cpython import _lock_of_threads, mend_forks

assert mend_forks() and mend_forks()
libc = ctypes.CDLL(None)
held, done = threading.Event(), threading.Event()

def hold():
    slot = ctypes.c_void_p(_lock_of_threads().value)
    libc.PyThread_acquire_lock(slot, 1)
    held.set()
    done.wait()
    libc.PyThread_release_lock(slot)

def in_child():
    thread = threading.Thread(target=int)  # needs the lock
    thread.start()
    thread.join()

holder = threading.Thread(target=hold)
holder.start()
held.wait()
child = os.fork()
if child == 0:
    in_child()
    grandchild = os.fork()
    if grandchild == 0:
        in_child()
        os._exit(3)
    os._exit(4 + (os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]) == 3))
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
done.set()
holder.join()
in_child()
assert subprocess.run(["true"]).returncode == 0
sys.exit(code)
"""

# The child of the thread without Python ends at once, because `fork` is all that the thread does.
FORKS_OF_OTHERS = """
import ctypes, os, runpy, sys, threading

assert runpy.run_path(sys.argv[1])["mend_forks"]()  # alone: libraries that torch loads act when a process ends
if os.fork() == 0:
    os._exit(0)
os.wait()
ended, libc = threading.Event(), ctypes.CDLL(None)

def use_python():
    while not ended.is_set():
        pass

user = threading.Thread(target=use_python)
user.start()
thread, child = ctypes.c_ulong(), ctypes.c_void_p()
libc.pthread_create(ctypes.byref(thread), None, ctypes.cast(libc.fork, ctypes.c_void_p), None)
libc.pthread_join(thread, ctypes.byref(child))
pid = child.value & 0xFFFFFFFF
killer = threading.Timer(20, os.kill, (pid, 9))
killer.start()
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
killer.cancel()
ended.set()
sys.exit(code)
"""


@pytest.mark.skipif(sys.version_info[:2] not in _FLAGS, reason="forks of this Python do not hang")
def test_a_fork_while_another_thread_has_the_lock_of_threads() -> None:
    """The holder waits for an event without the lock: `Event.wait` makes no thread."""
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKS], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (5, "")


def test_a_fork_by_a_thread_without_python() -> None:
    """It ends while another thread uses Python: nothing in it waits for the interpreter."""
    command = [sys.executable, "-W", "ignore", "-c", FORKS_OF_OTHERS, cpython.__file__]
    assert subprocess.run(command, check=False, timeout=60).returncode == 0


def test_what_other_versions_do() -> None:
    script = "from lightning_replica._compat.cpython import mend_forks; raise SystemExit(not mend_forks())"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=False).returncode == 0
