"""A run on machines that are made of namespaces: it is stopped at places, faults are made, and it is compared."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import psutil

from tests.support.etcd import ETCD
from tests.support.machines import Machine
from tests.support.ranks import free_port

SCRIPT = Path(__file__).parents[1] / "nodes" / "script.py"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
# As in a task of `srun`: what Lightning would read there says nothing about our ranks.
SLURM = {"SLURM_NTASKS": "3", "SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "train", "SLURM_LOCALID": "0"}
PATIENCE_S = 100.0
COMMAND = [sys.executable, "-m", "lightning_replica"]
# How many machines serve the store and nothing else: the first node serves it, a machine of its own, or etcd.
SERVE = {"first": 0, "alone": 1, "etcd": 3}

Stop: TypeAlias = tuple[int, str, int]
"""The step, the place and the rank where a run stops until the test lets it go on."""


def run_untouched(out: Path, nodes: int, local: int, steps: int) -> None:
    """Runs without a fault, all nodes on this machine, from the checkpoint in ``out`` if there is one."""
    port = free_port()
    command = [*COMMAND, "run", "--nnodes", str(nodes), "--nproc-per-node", str(local), "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1", str(SCRIPT), str(out)]
    command += [str(nodes), str(nodes * local), str(steps), "[]"]
    started = [
        subprocess.Popen(command, cwd=out, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(nodes)
    ]
    said = [each.communicate()[0] for each in started]
    assert [each.returncode for each in started] == [0] * nodes, "\n".join(said)


def start_store(store: str, made: list[Machine], out: Path) -> str:
    """Starts the store on the last of some machines, and returns what `Run.store` is then."""
    if store == "etcd":
        _start_etcd(made[-3:], out)
        return f"--rdzv-backend etcd --rdzv-endpoint {','.join(each.address for each in made[-3:])}"
    if store == "first":
        return made[0].address
    made[-1].start([*COMMAND, "store", f"{made[-1].address}:29500"], out / "store", ENVIRONMENT)
    return made[-1].address


def _start_etcd(members: list[Machine], out: Path) -> None:
    cluster = ",".join(f"{each.name}=http://{each.address}:2380" for each in members)
    for each in members:
        client, peer = f"http://{each.address}:2379", f"http://{each.address}:2380"
        command = [
            ETCD,
            "--name",
            each.name,
            "--data-dir",
            str(out / f"etcd-{each.name}"),
            "--initial-cluster",
            cluster,
        ]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client, "--logger", "zap"]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--log-outputs", "stderr"]
        each.start(command, out / f"log-etcd-{each.name}", dict(os.environ))


@dataclass(frozen=True)
class Result:
    """How a run has ended: each rank's step and digests, and the rows of the logger."""

    ranks: tuple[str, ...]
    rows: str = field(repr=False)

    @classmethod
    def of(cls, out: Path, ranks: int) -> "Result":
        found = [out / f"rank{rank}" for rank in range(ranks)]
        rows = out / "rows" / "metrics.csv"
        return cls(
            tuple(path.read_text() if path.exists() else "" for path in found),
            rows.read_text() if rows.exists() else "",
        )


@dataclass
class Run:
    """A run on machines, and what a test does to it.

    Attributes:
        out: Where it writes.
        nodes: Number of nodes that train.
        local: Number of ranks on each.
        steps: Number of steps.
        store: The address of the machine that serves the store; or the options that say where it is.
        stops: Where it stops.
        options: More options of `lightning-replica run`.
        environment: More environment variables.
        spares: Number of spares.
        started: The machines that should be running.
        all: The machines that were started.
    """

    out: Path
    nodes: int
    local: int
    steps: int
    store: str
    stops: Sequence[Stop] = ()
    options: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)
    spares: int = 1
    started: list[Machine] = field(default_factory=list)
    all: list[Machine] = field(default_factory=list)

    def start(self, machine: Machine, clock_s: int = 0) -> None:
        """Starts the command on a machine."""
        flags = ["--nnodes", str(self.nodes), "--spares", str(self.spares), "--nproc-per-node", str(self.local)]
        if not self.store.startswith("--"):
            flags += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.store}:29500"]
        else:
            flags += self.store.split()
        command = [*COMMAND, "run", *flags, *self.options, str(SCRIPT), str(self.out)]
        command += [str(self.nodes), str(self.nodes * self.local), str(self.steps), json.dumps(list(self.stops))]
        slurm = {**SLURM, "SLURM_PROCID": str(machine.number), "SLURM_NODEID": str(machine.number)}
        machine.start(command, self.log(machine), {**ENVIRONMENT, **slurm, **self.environment}, clock_s)
        self.all = [*(each for each in self.all if each is not machine), machine]
        self.started = [*(each for each in self.started if each is not machine), machine]

    def start_all(self, machines: Sequence[Machine]) -> None:
        """Starts the command on machines; those above the number of nodes come too late for a slot."""
        for number, machine in enumerate(machines):
            if number == self.nodes:
                self.until(lambda: self.text().count("has ranks") == self.nodes)
            self.start(machine)
        spares = len(machines) - self.nodes
        self.until(lambda: self.text().count("waits as a spare") == max(0, spares))

    def log(self, machine: Machine) -> Path:
        return self.out / f"log{machine.number}"

    def text(self) -> str:
        """What all nodes have said."""
        found = [self.log(machine) for machine in sorted(self.all, key=lambda each: each.number)]
        return "".join(f"--- {path.name}\n{path.read_text()}" for path in found if path.exists())

    def until(self, ready: Callable[[], bool]) -> None:
        """Waits while all machines live."""
        deadline = time.monotonic() + PATIENCE_S
        while not ready():
            for machine in self.started:
                assert machine.process is None or machine.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.01)

    def reach(self, number: int) -> None:
        """Waits until the run has come to a stop."""
        self.until((self.out / f"at{number}").exists)

    def go(self, number: int) -> None:
        """Lets the run go on from a stop."""
        (self.out / f"go{number}").touch()

    def says(self, text: str, times: int = 1) -> None:
        """Waits until nodes have said something."""
        self.until(lambda: self.text().count(text) >= times)

    def step(self) -> int:
        """The number of steps that rank 0 has made."""
        path = self.out / "step"
        return int(path.read_text() or 0) if path.exists() else 0

    def where(self, rank: int) -> tuple[str, int]:
        """The name of the machine that has a rank, and the number of the process there."""
        name, number = (self.out / f"process{rank}").read_text().split()
        return name, int(number)

    def named(self, name: str) -> Machine:
        """The machine of a name."""
        return next(machine for machine in self.all if machine.name == name)

    def machine_of(self, rank: int) -> Machine:
        return self.named(self.where(rank)[0])

    def kill(self, machine: Machine) -> None:
        """Kills a machine, of which nothing more is expected."""
        machine.kill()
        self.started.remove(machine)

    def kill_rank(self, rank: int) -> None:
        self.process_of(rank).kill()

    def process_of(self, rank: int) -> psutil.Process:
        """The process of a rank."""
        return self.machine_of(rank).find(self.where(rank)[1])

    def codes(self, within_s: float = PATIENCE_S) -> list[int]:
        """The exit codes of all machines that are left."""
        assert all(machine.process is not None for machine in self.started)
        processes: list[Any] = [machine.process for machine in self.started]
        try:
            return [process.wait(within_s) for process in processes]
        except subprocess.TimeoutExpired as error:
            raise AssertionError(self.text()) from error

    def result(self) -> Result:
        return Result.of(self.out, self.nodes * self.local)
