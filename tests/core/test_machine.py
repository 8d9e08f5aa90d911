"""What a process can tell about others on its machine."""

import os
import signal
import subprocess
import sys

from lightning_replica.core.machine import has_ended, is_stopped, machine, status_of


def test_a_process_ends() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    assert not has_ended(child.pid)
    assert not is_stopped(child.pid)
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    assert is_stopped(child.pid)
    assert not has_ended(child.pid)
    child.send_signal(signal.SIGCONT)
    assert child.stdin is not None
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert has_ended(child.pid), "a zombie has ended"
    child.wait()
    assert has_ended(child.pid)
    assert status_of(child.pid) == ""


def test_processes_of_one_machine_agree() -> None:
    code = "from lightning_replica.core.machine import machine; print(machine())"
    other = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert int(other.stdout) == machine() != -1
