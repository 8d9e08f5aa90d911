"""Runs a case: a real supervisor, real processes, and what they left behind."""

import json
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from lightning_replica.core.options import RecoveryOptions
from lightning_replica.launch.node import Process
from lightning_replica.launch.supervisor import Supervisor
from tests.support import job
from tests.support.forked import ForkedProcess

SHOWN_AFTER_S = 200.0
HUNG: list[str] = []  # what supervisors said of ranks that hung though no fault of that kind was meant


@dataclass
class Outcome:
    """What a run came to."""

    code: int
    ranks: list[dict[str, Any]]
    batches: list[dict[str, set[str]]]  # per rank: "epoch batch" -> digests seen there
    said: list[str]
    logs: str = field(repr=False)

    def assert_same(self, untouched: "Outcome", reported: str = "", in_step: bool = True) -> None:
        """To the last bit: weights, optimizer, schedulers, metrics, random numbers, and the batches that were seen.

        Nothing is reported as not exact but what ``reported`` says, which must be.
        """
        assert self.code == 0, self.logs
        if in_step:
            self.assert_in_step()
        for rank, (got, expected) in enumerate(zip(self.ranks, untouched.ranks, strict=True)):
            assert got == expected, f"rank {rank}\n{self.logs}"
        assert self.batches == untouched.batches, self.logs
        not_exact = [line for line in self.logs.splitlines() if "not exact" in line.lower()]
        assert [line for line in not_exact if not reported or reported not in line] == [], self.logs
        assert bool(not_exact) == bool(reported), self.logs

    def assert_in_step(self) -> None:
        """All ranks went the same way: none came to a collective that another had left out."""
        assert [line for line in self.said if "wait for each other" in line] == [], self.logs


class Trains(Protocol):
    """What every case has, that of `job` and others."""

    devices: int


def run(
    case: Trains,
    out: Path,
    max_restarts: int = 3,
    target: Callable[[Any, Path], None] = job.run,
    recovery: bool = True,
    process: type[ForkedProcess] = ForkedProcess,
) -> Outcome:
    """Has forked ranks run ``target`` under a supervisor."""
    out.mkdir(parents=True, exist_ok=True)
    said: list[str] = []

    def start(rank: int, environment: dict[str, str]) -> Process:
        environment = {**environment, "TESTED_BY": str(os.getpid())}
        return process(environment, out / f"log{rank}", target, case, out)

    least, most = case.hang if isinstance(case, job.Case) else job.HANG
    options = RecoveryOptions(recovery, max_restarts=max_restarts, hang_min_s=least, hang_max_s=most)
    if isinstance(case, job.Case) and case.gasp:
        options = replace(options, gasp=True, grace_s=case.grace_s)
    supervisor = Supervisor(start, case.devices, options, said.append, out)
    late = threading.Timer(SHOWN_AFTER_S, _show, (supervisor, said))
    os.environ["OMP_NUM_THREADS"] = "1"
    late.start()
    try:
        code = supervisor.run()
    finally:
        late.cancel()
        del os.environ["OMP_NUM_THREADS"]
    if (least, most) == job.HANG:
        HUNG.extend(line for line in said if "hangs" in line)
    results = [out / f"rank{rank}.json" for rank in range(case.devices)]
    return Outcome(
        code,
        [json.loads(path.read_text()) if path.exists() else {} for path in results],
        [_batches(out / f"batches{rank}") for rank in range(case.devices)],
        said,
        "".join(f"--- rank {r}\n{(out / f'log{r}').read_text()}" for r in range(case.devices)),
    )


def _show(supervisor: Supervisor, said: list[str]) -> None:
    """Print what was said, and where ranks are, shortly before the test's time is over."""
    print(*said, supervisor._node.called_back(), sep="\n")


def _batches(path: Path) -> dict[str, set[str]]:
    seen: dict[str, set[str]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        epoch, batch, digest = line.split()
        seen.setdefault(f"{epoch} {batch}", set()).add(digest)
    return seen
