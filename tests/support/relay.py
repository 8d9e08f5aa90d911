"""A network switch in user space, which delays frames, loses them, or passes them in one direction only.

Run as a program: ``python relay.py NAMESPACE ...`` makes a network interface ``eth0`` in each namespace, and carries
what one sends to the others as long as its standard input is open. Each line there is a JSON object that changes a
port: its number, and any of ``delay_s``, ``loss`` (a share of frames), ``sends`` and ``receives``. (The kernel's own
`netem` does this too, where a kernel has it.)
"""

import ctypes
import fcntl
import heapq
import itertools
import json
import os
import random
import selectors
import struct
import sys
import time
from dataclasses import dataclass

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_LARGEST = 65600
_MAC = 6  # bytes; the last one is the number of the port


@dataclass
class Port:
    """The port of one machine."""

    file: int
    delay_s: float = 0.0
    loss: float = 0.0
    sends: bool = True
    receives: bool = True


def _interface(namespace: str) -> int:
    """Make ``eth0`` in a namespace, and return the file through which its frames go."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/net") as own, open(f"/run/netns/{namespace}") as other:
        for into, last in ((other, False), (own, True)):
            if libc.setns(into.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")
            if not last:
                tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
                fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _IFF_TAP | _IFF_NO_PI))
    return tap


class Relay:
    """Carries frames between ports."""

    def __init__(self, ports: list[Port]) -> None:
        self._ports, self._dice, self._number = ports, random.Random(0), itertools.count()
        self._waiting: list[tuple[float, int, Port, bytes]] = []

    def change(self, line: bytes) -> None:
        for name, value in (changes := json.loads(line)).items():
            if name != "port":
                setattr(self._ports[changes["port"]], name, value)

    def take(self, port: Port) -> None:
        """Takes in what a machine has sent."""
        while True:
            try:
                frame = os.read(port.file, _LARGEST)
            except (BlockingIOError, OSError):  # nothing more, or the interface is not up yet
                return
            if port.sends:
                for target in self._targets(frame, port):
                    self._pass(frame, port, target)

    def _targets(self, frame: bytes, source: Port) -> list[Port]:
        known = [] if frame[0] & 1 else self._ports[frame[_MAC - 1] : frame[_MAC - 1] + 1]
        return known or [port for port in self._ports if port is not source]

    def _pass(self, frame: bytes, source: Port, target: Port) -> None:
        if target.receives and self._dice.random() >= source.loss + target.loss:
            due = time.monotonic() + source.delay_s + target.delay_s
            heapq.heappush(self._waiting, (due, next(self._number), target, frame))

    def give(self) -> float | None:
        """Gives machines what is due, and returns the seconds until more is."""
        while self._waiting:
            left = self._waiting[0][0] - time.monotonic()
            if left > 0:
                return left
            _, _, target, frame = heapq.heappop(self._waiting)
            try:
                os.write(target.file, frame)
            except OSError:  # its queue is full, or its interface is down: the frame is lost
                continue
        return None


def main(namespaces: list[str]) -> None:
    ports = [Port(_interface(namespace)) for namespace in namespaces]
    relay, selector = Relay(ports), selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    begun = b""
    for port in ports:
        selector.register(port.file, selectors.EVENT_READ, port)
    print("ready", flush=True)
    while True:
        for key, _ in selector.select(relay.give()):
            if key.data is not None:
                relay.take(key.data)
            elif read := os.read(0, _LARGEST):  # not `readline`, which may keep a second line to itself
                *lines, begun = (begun + read).split(b"\n")
                for line in lines:
                    relay.change(line)
            else:
                return


if __name__ == "__main__":
    main(sys.argv[1:])
