"""What a process can tell about others on its machine."""

import os
import subprocess
import sys

from lightning_replica.core.machine import has_ended, machine


def test_a_process_ends() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    assert not has_ended(child.pid)
    assert child.stdin is not None
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert has_ended(child.pid), "a zombie has ended"
    child.wait()
    assert has_ended(child.pid)


def test_processes_of_one_machine_agree() -> None:
    code = "from lightning_replica.core.machine import machine; print(machine())"
    other = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert int(other.stdout) == machine() != -1
