"""Starts a training of `nodes.py` on three machines, waits for it, and reads what it has recorded."""

import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nodes_systems import LIGHTHOUSE, NODES, RANKS, RANKS_OF_NODE, command, lighthouse

LOST, SPARE = 1, NODES  # machines
QUIET = 10  # steps between the moment when the spare is ready and the loss; they are the normal ones
CAP_S = 120.0  # after a loss
START_S = 240.0  # for each thing that comes before a loss


class Job:
    """One training on three machines.

    Args:
        system: The system.
        nodes: The machines.
        place: The directory that all processes share.
    """

    def __init__(self, system: str, nodes: list[Any], place: Path) -> None:
        self.system, self.nodes, self.place = system, nodes, place
        hosts = [f"{node.address} {node.name}" for node in nodes]
        (place / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))
        (place / "temporary").mkdir()
        self._seen: dict[str, float] = {}

    def start(self, number: int) -> None:
        """Start a machine, in which the names of all machines are known."""
        # Each machine has mounts of its own, so this changes only what the machine sees.
        inside = 'mount --bind "$0" /etc/hosts; exec "$@"'
        line = command(self.system, number, self.nodes[0].address, self.place)
        if self.system.startswith("torchft") and number == 0:
            inside = 'mount --bind "$0" /etc/hosts; lighthouse=$1; shift; $lighthouse & exec "$@"'
            line = [" ".join(lighthouse(self.system)), *line]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.place / "temporary"),  # a killed process leaves its files behind
            "TORCHFT_LIGHTHOUSE": f"http://{self.nodes[0].address}:{LIGHTHOUSE}",
            # Otherwise restarted workers may read the addresses of their predecessors and hang (torch 2.13).
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        shell = ["sh", "-c", inside, str(self.place / "hosts")]
        self.nodes[number].start([*shell, *line], self.place / f"log{number}", environment)

    def until(self, ready: Callable[[], bool], limit_s: float) -> None:
        """Wait until ``ready()``.

        Raises:
            RuntimeError: If that did not come in time, or a machine has ended before.
        """
        if not self.came(ready, limit_s, lambda: any(map(has_ended, self.nodes))):
            raise RuntimeError(f"{self.system} has ended, or is not ready after {limit_s:g} s\n{self.logs()}")

    def came(self, ready: Callable[[], bool], limit_s: float, over: Callable[[], bool] = lambda: False) -> bool:
        """Wait until ``ready()``. Return whether that came in time, and before ``over()``."""
        deadline = time.monotonic() + limit_s
        while not ready():
            if time.monotonic() > deadline or over():
                return False
            time.sleep(0.02)
        return True

    def logs(self) -> str:
        """Return the ends of the logs."""
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.place.glob("log*")))

    def marks(self, what: str, ranks: range, since: float = 0.0) -> list[float]:
        """Return when ranks came to a place of their script, from a time on."""
        file = self.place / "marks"
        lines = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
        return [
            int(ns) / 1e9 for name, rank, ns in lines if name == what and int(rank) in ranks and int(ns) / 1e9 > since
        ]

    def steps(self, world_size: int = 0) -> dict[int, float]:
        """Return when the first rank ended each step, of those that at least ``world_size`` ranks took part in."""
        first: dict[int, float] = {}
        for path in self.place.glob("steps*"):
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    step, ns, size = map(int, line.split())
                    if size >= world_size:
                        first[step] = min(ns / 1e9, first.get(step, math.inf))
        return first

    def watch_logs(self) -> None:
        """Note when replica_zero has said that it has decided, and that the spare begins."""
        for number, text in ((0, "takes its place"), (SPARE, "takes over ranks")):
            log = self.place / f"log{number}"
            if text not in self._seen and log.exists() and text in log.read_text():
                self._seen[text] = time.monotonic()

    def said(self, text: str) -> float:
        """Return when a machine was seen to have said something; see `watch_logs`."""
        return self._seen.get(text, math.nan)


def has_ended(node: Any) -> bool:
    """Return whether a machine was started and has ended."""
    return node.process is not None and node.process.poll() is not None


@contextmanager
def job(system: str, count: int) -> Iterator[Job]:
    """Make machines for a training, and remove them with all of their processes."""
    from tests.support.machines import machines

    with tempfile.TemporaryDirectory() as place, machines(count) as nodes:
        yield Job(system, nodes, Path(place))


def prepare(run: Job) -> None:
    """Start the training, and wait until the spare waits and some steps are done."""
    for number in range(NODES):
        run.start(number)
    run.until(lambda: len(run.marks("script", range(RANKS))) >= RANKS, START_S)
    if run.system != "torchft":
        run.start(SPARE)
    run.until(lambda: spare_is_ready(run), START_S)
    run.until(lambda: len(run.steps(RANKS)) >= QUIET, START_S)
    last = max(run.steps())
    run.until(lambda: max(run.steps(RANKS)) >= last + QUIET, START_S)


def spare_is_ready(run: Job) -> bool:
    """Return whether the spare can take over at once."""
    if run.system == "torchft":  # it has none
        return True
    if run.system == "torchft, spare":
        return (run.place / f"steps{RANKS}").exists() and run.steps(RANKS) != {}
    expected = 1 + (RANKS_OF_NODE if run.system.startswith("replica_zero") else 0)
    before = processor_s(run.nodes[SPARE])
    time.sleep(1.0)
    after = processor_s(run.nodes[SPARE])
    return (
        len(before) >= expected and before.keys() == after.keys() and sum(after.values()) - sum(before.values()) < 0.1
    )


def processor_s(node: Any) -> dict[int, float]:
    """Return how much time of a processor each Python process of a machine has used, in seconds."""
    import psutil

    found = {}
    for process in psutil.Process(node.process.pid).children(recursive=True):
        try:
            if process.cmdline()[:1] == [sys.executable]:
                found[process.pid] = sum(process.cpu_times()[:2])
        except psutil.NoSuchProcess:
            continue
    return found
