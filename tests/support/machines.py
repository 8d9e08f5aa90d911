"""Machines made of namespaces: each has a network, processes and a name of its own, and a switch connects them.

Needs root. Nothing of the real machine's network is touched, and no traffic leaves the namespaces. A machine's first
process is a shell; when it is killed, the kernel kills every process of the machine, as when power is lost.

Without PID namespaces, ranks of "two machines" would find each other's processes, and map each other's memory.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

NEEDS_ROOT = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None,
    reason="needs root, iproute2 and namespaces",
)
_MTU = 9000  # fewer frames for the relay


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Bridge:
    """A network whose switch is the kernel's. It is fast; a link is up or down."""

    def __init__(self, prefix: str, namespaces: Sequence[str]) -> None:
        self._switch = f"{prefix}switch"
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "switch", "up")
        for number, namespace in enumerate(namespaces):
            inside = ("link", "add", f"p{number}", "type", "veth", "peer", "name", "eth0", "netns", namespace)
            _ip("-n", self._switch, *inside)
            _ip("-n", self._switch, "link", "set", f"p{number}", "master", "switch", "up")

    def set(
        self, number: int, *, sends: bool = True, receives: bool = True, delay_s: float = 0, loss: float = 0
    ) -> None:
        assert sends == receives
        assert not delay_s
        assert not loss
        _ip("-n", self._switch, "link", "set", f"p{number}", "up" if sends else "down")

    def close(self) -> None:
        _ip("netns", "del", self._switch)


class Relayed:
    """A network whose switch is a process of ours (`relay`). Links can be slow, lose frames, or pass one direction."""

    def __init__(self, prefix: str, namespaces: Sequence[str]) -> None:
        program = [sys.executable, "-S", str(Path(__file__).with_name("relay.py")), *namespaces]
        self._process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"
        for number, namespace in enumerate(namespaces):
            address = ("address", f"02:00:00:00:00:{number:02x}")
            _ip("-n", namespace, "link", "set", "eth0", "mtu", str(_MTU), *address)

    def set(self, number: int, **changes: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"port": number, **changes}) + "\n")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Machine:
    """One machine.

    Args:
        prefix: A prefix of names that no other test uses.
        number: Its number, which is also the last part of its address.
    """

    def __init__(self, prefix: str, number: int) -> None:
        self.name, self.address = f"machine{number}", f"10.77.0.{number + 1}"
        self.number, self.namespace = number, f"{prefix}m{number}"
        self.process: subprocess.Popen[bytes] | None = None
        self._others: list[subprocess.Popen[bytes]] = []
        self._network: Bridge | Relayed | None = None
        _ip("netns", "add", self.namespace)

    def connect(self, network: "Bridge | Relayed") -> None:
        """Connects the machine's interface, which the network has made."""
        self._network = network
        _ip("-n", self.namespace, "addr", "add", f"{self.address}/24", "dev", "eth0")
        _ip("-n", self.namespace, "link", "set", "eth0", "up")
        _ip("-n", self.namespace, "link", "set", "lo", "up")

    def start(self, command: Sequence[str], log: Path, environment: dict[str, str], clock_s: int = 0) -> None:
        """Starts the machine's only command; its output goes to ``log``.

        Args:
            command: The command.
            log: The file, to which is added.
            environment: The environment variables.
            clock_s: By how much the machine's monotonic clock is ahead of others'.
        """
        if self.process is not None:
            self.process.wait()
        inside = f'hostname {self.name}; "$@"; exit $?'
        namespaces = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts"]
        namespaces += ["--time", "--monotonic", str(clock_s)] if clock_s else []
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *namespaces, "sh", "-c", inside, "sh", *command],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    def also(self, command: Sequence[str], log: Path) -> None:
        """Starts one more process here, in the background; it ends with the machine."""
        assert self.process is not None
        inside = str(psutil.Process(self.process.pid).children()[0].pid)
        with log.open("ab") as file:
            program = ["nsenter", "--target", inside, "--net", "--pid", *command]
            self._others.append(subprocess.Popen(program, stdout=file, stderr=subprocess.STDOUT))

    def link(self, state: str) -> None:
        """Sets its link to the switch "up" or "down". Nobody is told: what is sent is lost."""
        self.quality(sends=state == "up", receives=state == "up")

    def quality(self, **changes: float) -> None:
        """Changes its link; see `relay`. A bridge can only be up or down."""
        assert self._network is not None
        self._network.set(self.number, **changes)  # type: ignore[arg-type]

    def processes(self) -> list[psutil.Process]:
        """Its processes, with the numbers that they have outside."""
        return [] if self.process is None else psutil.Process(self.process.pid).children(recursive=True)

    def find(self, pid: int) -> psutil.Process:
        """The process that has a number inside of the machine."""
        return next(each for each in self.processes() if _number_inside(each) == pid)

    def supervisor(self) -> psutil.Process:
        """The process of the supervisor: the first one that the shell has started."""
        assert self.process is not None
        (shell,) = psutil.Process(self.process.pid).children()
        return shell.children()[0]

    def kill(self) -> None:
        """Kills all of its processes at once, and waits until each has ended."""
        if self.process is not None:
            inside = self.processes() if self.process.poll() is None else []
            self.process.kill()  # the kernel kills the first process of the machine with it, and that all others
            self.process.wait()
            _, left = psutil.wait_procs(inside, timeout=60)
            assert not left, left

    def remove(self) -> None:
        self.kill()
        for other in self._others:
            other.wait()  # the kernel has killed what it started, and with that it ends
        _ip("netns", "del", self.namespace)


def _number_inside(process: psutil.Process) -> int:
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    except OSError:  # it has just ended
        return -1
    return int(next(line for line in lines if line.startswith("NSpid:")).split()[-1])


@contextmanager
def machines(count: int, relayed: bool = False) -> Iterator[list[Machine]]:
    """Makes machines and removes them.

    Args:
        count: How many.
        relayed: Whether links can have delays and losses.
    """
    prefix = f"lr{os.getpid()}-"
    made: list[Machine] = []
    network = None
    try:
        made.extend(Machine(prefix, number) for number in range(count))
        network = (Relayed if relayed else Bridge)(prefix, [machine.namespace for machine in made])
        for machine in made:
            machine.connect(network)
        yield made
    finally:
        for machine in made:
            machine.remove()
        if network is not None:
            network.close()
