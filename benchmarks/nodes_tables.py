"""Turns the losses that `nodes.py` has caused into tables."""

import math
from statistics import median
from typing import Any

from common import Transformer, spread, write
from nodes_job import CAP_S
from nodes_systems import MAX_RESTARTS, NODES, RANKS, RANKS_OF_NODE, SYSTEMS, known_version

FAULTS = {"killed": "processes killed", "link-down": "link down"}
TARGETS = {"killed": "2 s", "link-down": "node_timeout + 2 s = 12 s"}
PHASES = ("stop", "clean", "regroup", "repair", "rollback", "resume")


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
- torchrun: `--nnodes {NODES}:{NODES} --max-restarts {MAX_RESTARTS}`, its own time-outs (a node is lost after three heartbeats that are missing,
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
