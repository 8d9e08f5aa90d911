"""Machines made of namespaces: each has a network, processes and a name of its own, and a switch connects them.

Needs root. Nothing of the real machine's network is touched, and no traffic leaves the namespaces. A machine's first
process is a shell; when it is killed, the kernel kills every process of the machine, as when power is lost.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

NEEDS_ROOT = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None,
    reason="needs root, iproute2 and namespaces",
)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Machine:
    """One machine.

    Args:
        prefix: A prefix of names that no other test uses.
        number: Its number, which is also the last part of its address.
    """

    def __init__(self, prefix: str, number: int) -> None:
        self.name, self.address = f"machine{number}", f"10.77.0.{number + 1}"
        self._namespace, self._port = f"{prefix}m{number}", f"p{number}"
        self._switch = f"{prefix}switch"
        self.process: subprocess.Popen[bytes] | None = None
        _ip("netns", "add", self._namespace)
        inside = ("link", "add", self._port, "type", "veth", "peer", "name", "eth0", "netns", self._namespace)
        _ip("-n", self._switch, *inside)
        _ip("-n", self._switch, "link", "set", self._port, "master", "switch", "up")
        _ip("-n", self._namespace, "addr", "add", f"{self.address}/24", "dev", "eth0")
        _ip("-n", self._namespace, "link", "set", "eth0", "up")
        _ip("-n", self._namespace, "link", "set", "lo", "up")

    def start(self, command: Sequence[str], log: Path, environment: dict[str, str]) -> None:
        """Starts the machine's only command; its output goes to ``log``."""
        inside = f'hostname {self.name}; "$@"; exit $?'
        namespaces = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts"]
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", self._namespace, *namespaces, "sh", "-c", inside, "sh", *command],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    def link(self, state: str) -> None:
        """Sets its link to the switch "up" or "down". Nobody is told: what is sent is lost."""
        _ip("-n", self._switch, "link", "set", self._port, state)

    def kill(self) -> None:
        """Kills all of its processes at once."""
        if self.process is not None:
            self.process.kill()  # the kernel kills the first process of the machine with it, and that all others
            self.process.wait()

    def remove(self) -> None:
        self.kill()
        _ip("netns", "del", self._namespace)


@contextmanager
def machines(count: int) -> Iterator[list[Machine]]:
    """Makes machines and removes them."""
    prefix, made = f"lr{os.getpid()}-", []
    switch = f"{prefix}switch"
    _ip("netns", "add", switch)
    try:
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        made.extend(Machine(prefix, number) for number in range(count))
        yield made
    finally:
        for machine in made:
            machine.remove()
        _ip("netns", "del", switch)
