"""The training of tests/support/job.py with callbacks of every kind, in one rank."""

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger

from lightning_replica import RecoveryCallback, RecoveryReport
from lightning_replica.core.lines import append
from tests.support import job
from tests.support.doubles import overriding, put

PHASES = ("stop", "clean", "regroup", "repair", "rollback", "resume")


@dataclass
class Hooked(job.Case):
    """A training with callbacks.

    ``fails`` lists the faults of hooks: (rank, phase, how often, how), with "exception" or "kill" for how.
    """

    fails: tuple[tuple[int, str, int, str], ...] = ()
    dies_telling: int = -1
    regroups: bool = True
    recovery: bool = True


@overriding(new=("write", "reached"))
class Recorder(RecoveryCallback):
    """Writes down what it is told, draws random numbers, and fails where it shall."""

    def __init__(self, case: Hooked, out: Path) -> None:
        self.case, self.out = case, out
        self.rank = int(os.environ["LOCAL_RANK"])

    def write(self, *values: Any) -> None:
        append(self.out / f"hooks{self.rank}", json.dumps(values) + "\n")

    def reached(self, trainer: Any, context: Any) -> None:
        assert trainer.global_rank == context.rank == self.rank
        self.write(
            context.phase, context.generation, context.is_replacement, context.step, context.replaced, os.getpid()
        )
        torch.rand(3)
        for number, (rank, phase, times, how) in enumerate(self.case.fails):
            done = self.out / f"failed{number}"
            fired = len(done.read_bytes()) if done.exists() else 0
            if (rank, phase) == (self.rank, context.phase) and fired < times:
                done.write_bytes(b"x" * (fired + 1))
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError(f"the hook of {phase} fails")

    def on_incident(self, trainer: Any, pl_module: Any, incident: Any) -> None:
        self.write("incident", incident.number)
        if (self.rank, "incident") in [(rank, phase) for rank, phase, _, _ in self.case.fails]:
            raise ValueError("the hook of incidents fails")
        mark = self.out / "died_telling"
        if self.rank == self.case.dies_telling and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


for name in PHASES:
    put(Recorder, f"on_recovery_{name}", lambda self, trainer, _, context: self.reached(trainer, context))


@overriding()
class Teacher(RecoveryCallback):
    """State of its own that no snapshot knows, and a process group of its own."""

    def __init__(self, case: Hooked, out: Path) -> None:
        self.case, self.out = case, out
        self.seen: dict[int, float] = {}
        self.group: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.group = dist.new_group()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        total = outputs["loss"].detach().clone()
        dist.all_reduce(total, group=self.group)
        self.seen[trainer.fit_loop.epoch_loop.total_batch_idx] = total.item()

    def on_recovery_regroup(self, trainer: Any, pl_module: Any, context: Any) -> None:
        if self.case.regroups:
            self.group = dist.new_group()

    def on_recovery_repair(self, trainer: Any, pl_module: Any, context: Any) -> None:
        if context.replaced:
            self.seen = trainer.strategy.broadcast(self.seen, src=context.survivors[0])
        one = torch.ones(1)
        dist.all_reduce(one, group=self.group)
        assert one.item() == context.world_size

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        (self.out / f"seen{trainer.global_rank}.json").write_text(json.dumps(self.seen))


def train(case: Hooked, out: Path) -> None:
    """The target of `world.run`."""
    callbacks = (Recorder(case, out), Teacher(case, out), RecoveryReport(out / "recovery.jsonl"))
    logger = CSVLogger(out, name="csv", version="run", flush_logs_every_n_steps=1)
    job.run(case, out, callbacks, logger, recovery=case.recovery)
