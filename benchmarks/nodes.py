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
import json
import math
import os
import random
import sys
import time
import warnings
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import RESULTS
from nodes_job import CAP_S, LOST, QUIET, SPARE, START_S, Job, job, prepare
from nodes_systems import NODES, RANKS, RANKS_OF_NODE, STEPS, SYSTEMS, available, torchft_node, train
from nodes_tables import FAULTS, cell, show

warnings.filterwarnings("ignore")


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


# The measurement


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
