"""What is done about faults of CPython."""

import subprocess
import sys

import pytest

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


@pytest.mark.skipif(sys.version_info[:2] not in _FLAGS, reason="forks of this Python do not hang")
def test_a_fork_while_another_thread_has_the_lock_of_threads() -> None:
    """The holder waits for an event without the lock: `Event.wait` makes no thread."""
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKS], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (5, "")


def test_what_other_versions_do() -> None:
    script = "from lightning_replica._compat.cpython import mend_forks; raise SystemExit(not mend_forks())"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=False).returncode == 0
