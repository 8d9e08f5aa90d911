"""What the loss of a whole node costs, seen from outside: replica_zero, torchrun with a checkpoint every step, torchft.

    pip install torchft      # the table leaves it out if it is missing
    sudo python benchmarks/nodes.py      # as root; needs iproute2, unshare, and pytest for `tests/support/machines.py`

Three machines made of namespaces: two nodes with two ranks each, and a spare. All ranks train the same model with the
same optimizer on CPU over gloo. At a random time of a step, the second node is lost. Either all of its processes are
killed, or its link goes down and stays down. The first node serves the store, or the lighthouse of torchft. All
processes record when each of their steps ended. The cost is the time from the end of the last good step to the end of
the next good step on any node, minus the median step. Every loss is one run.
"""

import argparse
import hashlib
import json
import math
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from common import BATCH, LENGTH, RESULTS, VOCABULARY, Transformer, loss_of, spread, write
from recovery_peers import Trace, batches, parts, with_torchrun

warnings.filterwarnings("ignore")
NODES, RANKS_OF_NODE = 2, 2
RANKS = NODES * RANKS_OF_NODE
LOST, SPARE = 1, NODES  # machines
STEPS = 60  # of an exact run; the others end soon after the loss
QUIET = 10  # steps between the moment when the spare is ready and the loss; they are the normal ones
CAP_S = 120.0  # after a loss
START_S = 240.0  # for each thing that comes before a loss
MAX_RESTARTS = 3  # of a node
LIGHTHOUSE, STORE = 29510, 29500  # ports
SYSTEMS = ("replica_zero", "replica_zero, 5 s", "torchrun", "torchft", "torchft, spare")
FAULTS = {"killed": "processes killed", "link-down": "link down"}
TARGETS = {"killed": "2 s", "link-down": "node_timeout + 2 s = 12 s"}
PHASES = ("stop", "clean", "regroup", "repair", "rollback", "resume")


# A rank of each system


def mark(place: Path, what: str, rank: int) -> None:
    """Record that a rank has come to a place of its script."""
    with (place / "marks").open("a") as file:
        file.write(f"{what} {rank} {time.monotonic_ns()}\n")


def with_replica_zero(trace: Trace) -> None:
    """Train as a user does, with a LightningModule and a Trainer, and record the digest of the weights at the end."""
    import lightning as L
    from lightning.pytorch.callbacks import Callback
    from module import Module
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_replica import RecoveryReport, ReplicaZeroStrategy

    class Ended(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            trace.ended(trainer.global_step, trainer.world_size)

    torch.manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (BATCH * RANKS * (STEPS + 1), LENGTH))
    trainer = L.Trainer(
        strategy=ReplicaZeroStrategy(),
        accelerator="cpu",
        devices=RANKS_OF_NODE,
        num_nodes=NODES,
        max_steps=STEPS,
        callbacks=[Ended(), RecoveryReport(trace.place / "recovery.jsonl")],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    mark(trace.place, "fit", trace.rank)
    trainer.fit(module, DataLoader(TensorDataset(tokens), batch_size=BATCH))
    digest = hashlib.sha256()
    for weight in module.state_dict().values():
        digest.update(weight.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    (trace.place / f"weights{trace.rank}").write_text(digest.hexdigest())


def with_torchft(trace: Trace, spare: bool) -> None:
    """Train with a replica group for each rank, and the time-outs of torchft's own example, train_ddp.py.

    Args:
        trace: Records the steps.
        spare: Whether there are more groups than are needed; those add gradients of zero until others are lost.
    """
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
    from torchft.manager import WorldSizeMode

    class Wrapped(DistributedDataParallel):
        """Goes on when a collective fails: the hook of torchft 0.2 then ends the process (`assert fut._fut`)."""

        @staticmethod
        def _comm_hook(state: Manager, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            state.allreduce(bucket.buffer()).wait()  # tells the manager of an error, so that it does not commit
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

    model, inner = parts()
    address = socket.gethostbyname(socket.gethostname())
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=RANKS if spare else 1,
        world_size_mode=WorldSizeMode.FIXED_WITH_SPARES if spare else WorldSizeMode.DYNAMIC,
        timeout=timedelta(seconds=30),
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        replica_id=f"replica_{trace.rank}",
        hostname=address,
    )
    wrapped, optimizer = Wrapped(manager, model), Optimizer(manager, inner)
    data = batches(trace.rank, STEPS)
    while True:
        step = manager.current_step()
        optimizer.zero_grad()
        loss_of(wrapped, data[step % STEPS]).backward()
        optimizer.step()
        if manager.current_step() > step:
            trace.ended(manager.current_step(), manager.num_participants())


def torchft_node(system: str, number: int, place: Path) -> None:
    """Run the ranks of a node, and start again at once any that ends, as torchrun would."""

    def start(rank: int) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(own(system, place), env={**os.environ, "RANK": str(rank)})

    ranks = range(number * RANKS_OF_NODE, (number + 1) * RANKS_OF_NODE)
    processes, restarts = {rank: start(rank) for rank in ranks}, 0
    while restarts <= MAX_RESTARTS:
        for rank, process in processes.items():
            if process.poll() is not None:
                processes[rank], restarts = start(rank), restarts + 1
        time.sleep(0.01)


def train(system: str, place: Path) -> None:
    """Be one rank."""
    torch.set_num_threads(1)
    trace = Trace(place, int(os.environ["RANK"]), kills=0)
    mark(place, "script", trace.rank)
    if system.startswith("replica_zero"):
        with_replica_zero(trace)
    elif system == "torchrun":
        with_torchrun(trace, 10**4)
    else:
        with_torchft(trace, spare=system == "torchft, spare")


# What the machines run


def own(system: str, place: Path) -> list[str]:
    """Return the command line of this script as a rank."""
    return [sys.executable, str(Path(__file__).resolve()), "--rank-of", system, "--place", str(place)]


def command(system: str, number: int, store: str, place: Path) -> list[str]:
    """Return what a machine runs.

    Args:
        system: The system.
        number: Number of the machine.
        store: Address of the first machine.
        place: The directory that all processes share.
    """
    nodes = ["--nproc-per-node", str(RANKS_OF_NODE), "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{store}:{STORE}"]
    if system.startswith("replica_zero"):
        launcher = ["lightning_replica", "run", "--nnodes", str(NODES), "--spares", "1"]
        launcher += ["--node-timeout", "5"] if system.endswith("5 s") else []
    elif system == "torchrun":
        launcher = ["torch.distributed.run", "--nnodes", f"{NODES}:{NODES}", "--rdzv-id", "1"]
        launcher += ["--max-restarts", str(MAX_RESTARTS)]
    else:
        return [*own(system, place), "--node", str(number)]
    return [sys.executable, "-m", *launcher, *nodes, *own(system, place)[1:]]


def lighthouse(system: str) -> list[str]:
    """Return the command line of torchft's lighthouse, as its README has it, but that it waits for enough groups."""
    least = RANKS if system == "torchft, spare" else RANKS_OF_NODE
    program = str(Path(sys.executable).with_name("torchft_lighthouse"))
    options = ["--min_replicas", str(least), "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
    return [program, *options, "--bind", f"[::]:{LIGHTHOUSE}"]


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


# One loss


@dataclass
class Loss:
    """What one loss has cost, in seconds; None: not within `CAP_S`."""

    recovery: float | None
    whole: float | None
    steps: list[float]
    weights: str = ""
    breakdown: dict[str, float] | None = None
    incident: dict[str, Any] | None = None


def lose(system: str, fault: str, seed: int, untouched: str) -> Loss:
    """Run one training in which a node is lost.

    Args:
        system: The system.
        fault: A name of `FAULTS`.
        seed: When in a step the node is lost.
        untouched: The digest of an untouched run's weights.
    """
    with job(system, NODES + 1) as run:
        prepare(run)
        before = run.steps(RANKS)
        steps = normal(before)
        run.until(lambda: len(run.steps()) > len(before), CAP_S)
        time.sleep(random.Random(seed).random() * median(steps))
        at = time.monotonic()
        if fault == "killed":
            run.nodes[LOST].kill()
        else:
            run.nodes[LOST].link("down")
        if system == "torchft":
            run.start(SPARE)  # what a scheduler would do

        def is_over() -> bool:
            run.watch_logs()
            after = [end for end in run.steps(RANKS).values() if end > at]
            return len(after) >= 4 and stalled(run.steps(), at, steps) is not None

        run.came(is_over, CAP_S)
        stall = stalled(run.steps(), at, steps)
        loss = Loss(None, None, steps)
        if stall is None:
            print(f"no good step within {CAP_S:g} s\n{run.logs()}")
            return loss
        loss.recovery = stall.extra
        whole = [end for end in run.steps(RANKS).values() if end >= stall.ended]
        loss.whole = min(whole) - stall.ended + stall.extra if whole else None
        if system.startswith("replica_zero"):
            explain(run, loss, stall, at)
            finish(run, loss, untouched)
        return loss


def normal(ends: dict[int, float]) -> list[float]:
    """Return the seconds of each of the last steps."""
    return [ends[step] - ends[step - 1] for step in sorted(ends)[-QUIET:] if step - 1 in ends]


@dataclass
class Stall:
    """The time between two good steps in which a loss lies."""

    began: float
    ended: float
    extra: float


def stalled(ends: dict[int, float], at: float, steps: list[float]) -> Stall | None:
    """Find the longer one of the two intervals after the loss: the step in flight may still have ended.

    Args:
        ends: When each step ended.
        at: When the node was lost.
        steps: The seconds of normal steps.
    """
    known = sorted((end, step) for step, end in ends.items())
    last = max((number for number, (end, _) in enumerate(known) if end <= at), default=0)
    if len(known) < last + 3:
        return None
    found = []
    for (began, first), (ended, second) in zip(known[last : last + 2], known[last + 1 : last + 3], strict=True):
        # A restarted run may have saved a step whose end nobody has recorded.
        found.append(Stall(began, ended, ended - began - median(steps) * max(1, second - first)))
    return max(found, key=lambda stall: stall.extra)


def explain(run: Job, loss: Loss, stall: Stall, at: float) -> None:
    """Break the time of a recovery down, from the loss on."""
    lines = (run.place / "recovery.jsonl").read_text().splitlines()
    incident = json.loads(lines[0])
    seen = datetime.fromisoformat(incident["time"]).timestamp() - time.time() + time.monotonic()
    moved = range(LOST * RANKS_OF_NODE, (LOST + 1) * RANKS_OF_NODE)
    ends = {
        "lost": run.said("takes its place"),
        "ordered": run.said("takes over ranks"),
        "script": max(run.marks("script", moved, at), default=math.nan),
        "fit": max(run.marks("fit", moved, at), default=math.nan),
        "recovered": seen + incident["recovery_s"],
        "good step": stall.ended,
    }
    loss.breakdown = {"before": at - stall.began, "seen": seen - at}
    began = at
    for name, end in ends.items():
        loss.breakdown[name], began = end - began, end
    loss.incident = incident


def finish(run: Job, loss: Loss, untouched: str) -> None:
    """Wait until the run has ended, and compare its weights."""
    codes = [run.nodes[number].process.wait(CAP_S + 5 * STEPS) for number in (0, SPARE)]
    if any(codes):
        print(f"exit codes {codes}\n{run.logs()}")
    loss.weights = "others" if any(codes) or weights(run) != untouched else "the same"


def weights(run: Job) -> str:
    """Return the digest of the weights of all ranks."""
    found = {(run.place / f"weights{rank}").read_text() for rank in range(RANKS)}
    return found.pop() if len(found) == 1 else "ranks differ"


def run_untouched() -> str:
    """Train without a loss, and return the digest of the weights."""
    with job("replica_zero", NODES) as run:
        for number in range(NODES):
            run.start(number)
        for node in run.nodes:
            if node.process.wait(START_S + 5 * STEPS):
                raise RuntimeError(run.logs())
        return weights(run)


# The tables


def cell(values: list[float | None]) -> str:
    """Return the median and the middle half, or how often the time was over."""
    seen = [value for value in values if value is not None]
    if len(seen) == len(values):
        return spread(seen)
    over = f"> {CAP_S:g}"
    return f"{over} in {len(values) - len(seen)} of {len(values)}, else {spread(seen)}" if seen else over


def limits(values: list[float | None]) -> str:
    """Return the least and the greatest value."""
    ordered = sorted(math.inf if value is None else value for value in values)
    return " .. ".join(f"> {CAP_S:g}" if math.isinf(value) else f"{value:.3g}" for value in (ordered[0], ordered[-1]))


def row(system: str, fault: str, losses: list[dict[str, Any]]) -> list[str]:
    """Return the row of a system and a fault."""
    recovery = [loss["recovery"] for loss in losses]
    same = sum(loss["weights"] == "the same" for loss in losses)
    return [
        FAULTS[fault],
        system,
        str(len(losses)),
        cell(recovery),
        limits(recovery),
        cell([loss["whole"] for loss in losses]),
        spread([step for loss in losses for step in loss["steps"]]),
        f"the same in {same} of {len(losses)}" if system.startswith("replica_zero") else "-",
    ]


def breakdown(raw: dict[str, dict[str, Any]]) -> str:
    """Return a table of where the time of replica_zero goes."""
    names = {
        "before": "last good step .. loss",
        "lost": "loss .. node is given up",
        "ordered": ".. spare is told",
        "script": ".. its ranks run the script",
        "fit": ".. and call fit",
        "recovered": ".. recovered",
        "good step": ".. next good step",
    }
    rows = []
    for fault, text in FAULTS.items():
        losses = [loss for loss in raw.get(f"replica_zero, {fault}", []) if loss["breakdown"]]
        if losses:
            times = [f"{median(loss['breakdown'][name] for loss in losses):.2f}" for name in names]
            phases = [f"{median(loss['incident']['phases_ms'][name] for loss in losses) / 1000:.2f}" for name in PHASES]
            seen = f"{median(loss['breakdown']['seen'] for loss in losses):.2f}"
            rows.append([text, *times, seen, *phases])
    if not rows:
        return ""
    header = ["fault", *names.values(), "loss .. a survivor sees it", *PHASES]
    lines = [header, ["---"] * len(header), *rows]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"""
Where the time of replica_zero goes: medians, in seconds. The next good step contains a normal one. The phases are those of
rank 0, which survives, from the moment when it sees the fault; in "regroup" it waits for the ranks on the spare.

{table}
"""


def known_version(package: str) -> str:
    """Return a package's name and version."""
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"


def notes(raw: dict[str, Any]) -> str:
    """Return what the table has to say besides."""
    parameters = sum(p.numel() for p in Transformer().parameters())
    packages = ", ".join(map(known_version, ("lightning-replica", "lightning", "torch", "torchft")))
    targets = "; ".join(f"{FAULTS[fault]}: {target}" for fault, target in TARGETS.items())
    return f"""
Seconds; median and middle half. {NODES} nodes of {RANKS_OF_NODE} ranks and a spare: three machines made of network and process namespaces,
which share the cores of this one. {parameters / 1e6:.1f} M parameters, fused AdamW, CPU, gloo. {packages}. Every loss is one run; the second
node is lost at a random time of a step, and the first serves the store. From the end of the last good step to the end of the
next on any node, less the median step; if the step in flight still ends, then to the step after it. "All ranks are in
again": until the next good step of {RANKS} ranks. Nothing was waited for longer than {CAP_S:g} s after the loss. Set as targets for
replica_zero: {targets}.

- replica_zero: `lightning-replica run` and `ReplicaZeroStrategy()` with their defaults (`--node-timeout 10`). Survivors keep
  their processes, the spare has standbys, and the weights at the end are compared with those of an untouched run.
- replica_zero, 5 s: the same with `--node-timeout 5`, for comparison with torchft's time-outs.
- torchrun: `--nnodes {NODES}:{NODES} --max-restarts {MAX_RESTARTS}`, its own time-outs (a node is lost after three signs of life that are missing,
  15 s), a third agent that waits. DDP; rank 0 writes a checkpoint after every step (that is in its normal step) to a directory that all nodes
  share. All ranks start again, from the last checkpoint.
- torchft: each rank is a replica group; time-outs of its example train_ddp.py (gloo 5 s, manager 30 s) and the lighthouse of
  its README (`--join_timeout_ms 10000`; a group is lost after 5 s). It continues with {RANKS - RANKS_OF_NODE} of {RANKS} groups and so with a smaller
  batch: not the same run any more. Two new groups start on the third node at the moment of the loss. Where gloo reports
  an error, the hook of its DistributedDataParallel ends the process (0.2.0: `assert fut._fut`), and then all groups begin again at step 0;
  so the hook is replaced here by one that goes on.
- torchft, spare: the same with WorldSizeMode.FIXED_WITH_SPARES. The two groups of the third node compute from the start, and
  their gradients count as zero until others are lost. They bring other batches: not the same run either.
{breakdown(raw)}"""


def show(raw: dict[str, Any]) -> None:
    """Write the tables."""
    header = [
        "fault",
        "system",
        "losses",
        "until the next good step",
        "least .. most",
        "until all ranks are in again",
        "a normal step",
        "weights of an untouched run",
    ]
    found = [(fault, system, raw.get(f"{system}, {fault}")) for fault in FAULTS for system in SYSTEMS]
    rows = [row(system, fault, losses) for fault, system, losses in found if losses]
    write("nodes", "What the loss of a node costs", header, rows, notes(raw), raw)


def available() -> list[str]:
    """Return the systems that are installed."""
    there = not known_version("torchft").startswith("no ")
    return [system for system in SYSTEMS if there or not system.startswith("torchft")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5, help="losses of each kind and system")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, help="measure only these, and keep the other figures")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, help="likewise")
    parser.add_argument("--rank-of", choices=SYSTEMS, help="be a rank of this system")
    parser.add_argument("--node", type=int, help="be a node of torchft")
    parser.add_argument("--place", type=Path, help="the directory that all processes share")
    args = parser.parse_args()
    if args.node is not None:
        torchft_node(args.rank_of, args.node, args.place)
    elif args.rank_of:
        train(args.rank_of, args.place)
    else:
        fresh = not (args.systems or args.faults)
        measure(args.systems or available(), args.faults or list(FAULTS), args.kills, fresh)


def measure(systems: list[str], faults: list[str], kills: int, fresh: bool) -> None:
    """Measure, and write the tables after each system and fault."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.support.machines import NEEDS_ROOT

    if NEEDS_ROOT.args[0]:
        raise SystemExit(f"{Path(__file__).name} {NEEDS_ROOT.kwargs['reason']}.")
    if os.getloadavg()[0] > 0.5:
        print(f"Others use this machine (load {os.getloadavg()[0]:.1f}): these figures are provisional.")
    file = RESULTS / "nodes.json"
    raw: dict[str, Any] = {} if fresh or not file.exists() else json.loads(file.read_text())
    untouched = run_untouched() if any(system.startswith("replica_zero") for system in systems) else ""
    for fault in faults:
        for system in systems:
            if (system, fault) == ("replica_zero, 5 s", "killed"):
                continue  # it waits for no time-out
            raw[f"{system}, {fault}"] = []
            for seed in range(kills):
                loss = lose(system, fault, seed, untouched)
                print(f"{system}, {FAULTS[fault]}: {cell([loss.recovery])} s {loss.weights}", flush=True)
                raw[f"{system}, {fault}"].append(vars(loss))
            show(raw)


if __name__ == "__main__":
    main()
