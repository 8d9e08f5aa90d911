"""Runs of a script under `lightning-replica chaos`: one untouched, then others with faults, and their results."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lightning_replica.chaos import experiment as in_script
from lightning_replica.chaos.compare import RankPrint, differences, read, resumed_differences, varying_objects
from lightning_replica.chaos.experiment import REACHED, STRUCK, VARIABLE, Experiment
from lightning_replica.chaos.faults import Dice, InjectedFault
from lightning_replica.chaos.outside import OUTSIDE, Hit, Strike, Striker
from lightning_replica.chaos.processes import Job, Role
from lightning_replica.chaos.progress import Progress
from lightning_replica.checkpoint.directory import CheckpointDirectory
from lightning_replica.core.signals import signal_name
from lightning_replica.errors import ConfigurationError
from lightning_replica.exit_codes import GASP_WRITTEN
from lightning_replica.launch.watch import INSTEAD as STACKS
from lightning_replica.trainer.extension import VARIABLE as EXTENSION

LOG, EXPERIMENT = "log.txt", "experiment.json"
_RESTARTS_TO_SPARE = 3
_LOOK_S = 0.02  # between checks whether a signal is due
_END_S = 30.0  # in which all processes of a job must end after it; a DataLoader worker checks its parent every 5 s


@dataclass(frozen=True)
class Struck:
    """A fault that has struck.

    Attributes:
        fault: The fault.
        step: Number of updates that were applied by then.
        recovered: Whether training continued after it.
    """

    fault: InjectedFault | Hit
    step: int
    recovered: bool


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
        folder: Where its files are.
        code: Exit code of the script; None if it took too long.
        struck: Faults that struck, in the order in which they did.
        missed: Faults that did not strike: their point was not reached when they were due.
        failure: Why the run cannot be compared; empty if it can.
        differences: What differs from the untouched run.
    """

    folder: Path
    code: int | None
    struck: list[Struck] = field(default_factory=list)
    missed: Sequence[InjectedFault | Strike] = ()
    failure: str = ""
    differences: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """The result in one word."""
        return "failed" if self.failure else "different" if self.differences else "identical"


class Laboratory:
    """Runs one script repeatedly.

    Args:
        command: The command line that the user would type.
        folder: The folder in which each run gets a folder.
        base: What all runs have in common.
        timeout_s: Seconds after which a run has failed.
        options: Options of recovery that runs with faults have in place of the script's own.

    Attributes:
        untouched: What the ranks of the untouched run have written.
        last: The last step at which each point is reached.
        varying: Names of objects that differ between two untouched runs; empty before `repeat`.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        base: Experiment,
        timeout_s: float,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._command, self._folder = list(command), folder
        self._base, self._timeout_s, self._options = base, timeout_s, options
        self.untouched: list[RankPrint] = []
        self.varying: set[str] = set()
        self.last: dict[str, int] = {}

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.untouched[0].world

    @property
    def steps(self) -> int:
        """Number of steps of the first fit."""
        return self.untouched[0].last_step

    def leave_alone(self) -> None:
        """Run the script untouched. All other runs are compared with this run.

        Raises:
            ConfigurationError: If the script fails, or does not train with `replica_zero`.
        """
        folder = self._new("untouched")
        code = self._execute(replace(self._base, folder=str(folder)), folder)
        if code != 0:
            steps, hint = self._base.max_steps, ""
            if steps:
                hint = f" Each fit ended after {steps} steps; if it needs more, as for a validation, choose --steps."
            raise ConfigurationError(f"The script fails without any fault: {_ended(code)}.{hint}\n{_tail(folder)}")
        self.untouched = read(folder)
        for rank in range(self.ranks):
            path = folder / REACHED.format(rank)
            if not path.exists():
                raise ConfigurationError(f"Rank {rank} has not reached the end of its fit, although no fault struck.")
            for point, step in json.loads(path.read_text()).items():
                self.last[point] = min(step, self.last.get(point, step))

    def repeat(self) -> list[str]:
        """Run the script untouched once more, and return the differences. The script itself causes these.

        Objects that differ count as `varying`, and not as differences.
        """
        folder = self._new("untouched-again")
        code = self._execute(replace(self._base, folder=str(folder)), folder)
        if code != 0:
            return [_ended(code)]
        again = read(folder)
        self.varying = varying_objects(self.untouched, again) if len(again) == self.ranks else set()
        return differences(self.untouched, again, varying=self.varying)

    def draw(self, dice: Dice, count: int | None, mtbf_steps: float | None) -> list[InjectedFault]:
        """Draw random faults for one run: ``count`` of them, or one every ``mtbf_steps`` steps on average."""
        if mtbf_steps is None:
            steps = dice.spread(count or 0, self.steps)
        else:
            times = dice.arrivals(mtbf_steps, 10 + int(4 * self.steps / mtbf_steps))
            steps = [int(at) for at in times if at < self.steps]
        return dice.draw([(step, 0.0) for step in steps], self.ranks, self.last)

    def hurt(self, name: str, faults: Sequence[InjectedFault], spaced: bool) -> Result:
        """Run the script with injected faults, and return the result.

        Raises:
            ConfigurationError: If a fault names a rank that does not exist.
        """
        for fault in faults:
            if fault.rank >= self.ranks:
                raise ConfigurationError(f"{fault} strikes rank {fault.rank}, but the ranks are 0 to {self.ranks - 1}.")
        folder = self._new(name)
        code = self._execute(self._hurting(folder, len(faults), [str(fault) for fault in faults], spaced), folder)
        prints = _prints(folder)
        struck = _struck(folder, prints)
        missed = list(faults)
        for each in struck:
            missed.remove(each.fault)  # type: ignore[arg-type]  # nothing else strikes in such a run
        return self._judge(Result(folder, code, struck, missed), prints)

    def strike(self, name: str, strikes: Sequence[Strike], roles: Sequence[Role]) -> Result:
        """Run the script, send signals to its processes from outside, and return the result."""
        folder = self._new(name)
        progress = Progress(folder, self.ranks)
        job = Job(folder / EXPERIMENT)
        striker = Striker(job, progress, list(strikes), roles, self.steps, self._step_s(), folder / OUTSIDE)
        code = self._execute(self._hurting(folder, len(strikes)), folder, striker)
        prints = _prints(folder)
        struck = [Struck(hit, hit.step, _went_on(prints, hit.step)) for hit in striker.hits]
        failure = f"These processes outlived the run: {', '.join(map(str, job.outlived))}." if job.outlived else ""
        missed = [*striker.missed, *striker.strikes]
        return self._judge(Result(folder, code, struck, missed, failure), prints)

    def stop_and_resume(self, name: str, fault: InjectedFault) -> Result:
        """Run the script until ``fault`` ends it with a checkpoint, resume from that, and return the result."""
        first, second = self._new(f"{name}-1"), self._new(f"{name}-2")
        saves = second / "checkpoints"
        stopping = replace(self._hurting(first, 0, [str(fault)]), saves_to=str(saves))
        code = self._execute(stopping, first)
        left = _prints(first)
        struck = _struck(first, left)
        if not struck:
            return self._judge(Result(first, code, [], [fault]), left)
        if code != GASP_WRITTEN:
            return Result(first, code, struck, [], f"{_ended(code)}\n{_tail(first)}")
        saved = CheckpointDirectory(saves).tracked or ""
        resuming = replace(self._base, folder=str(second), resumes_from=str(saves / saved))
        code = self._execute(resuming, second)
        rest = _prints(second)
        if code != 0 or not _came_to_the_end(rest):
            return Result(second, code, struck, [], f"{_ended(code)}\n{_tail(second)}")
        found = resumed_differences(self.untouched, left, rest, self.varying)
        return Result(second, code, [replace(each, recovered=True) for each in struck], [], "", found)

    def _hurting(self, folder: Path, count: int, faults: list[str] | None = None, spaced: bool = True) -> Experiment:
        options = {"max_restarts": count + _RESTARTS_TO_SPARE, **self._options}
        return replace(self._base, folder=str(folder), faults=faults or [], spaced=spaced, options=options, hurt=True)

    def _step_s(self) -> float:
        """Return the duration of one step of the untouched run, in s."""
        path = self._folder / "untouched" / "rank0.jsonl"
        return max(0.0, path.stat().st_mtime - self.untouched[0].begun) / max(1, self.steps)

    def _judge(self, run: Result, prints: list[RankPrint]) -> Result:
        stopped = any(each.fault.kind == "sigterm" for each in run.struck)
        ended = _came_to_the_end(prints)
        if run.code not in ((0, 128 + signal.SIGTERM) if stopped else (0,)) or not (ended or stopped):
            return replace(run, failure=f"{_ended(run.code)}\n{_tail(run.folder)}")
        flipped = any(each.fault.kind == "corrupt" for each in run.struck)
        found = differences(self.untouched, prints, stopped and not ended, flipped, self.varying)
        return replace(run, differences=found)

    def _new(self, name: str) -> Path:
        folder = self._folder / name
        folder.mkdir(parents=True)
        return folder.resolve()

    def _execute(self, experiment: Experiment, folder: Path, striker: Striker | None = None) -> int | None:
        """Run the script, and run it again after each fault that ends it. Return the last exit code."""
        path = folder / EXPERIMENT
        experiment.write(path)
        deadline, starts = time.monotonic() + self._timeout_s, 0
        while True:
            starts += 1
            code = self._start(path, folder, deadline, striker)
            if code in (0, None) or striker is None or starts >= striker.starts:
                return code

    def _start(self, path: Path, folder: Path, deadline: float, striker: Striker | None) -> int | None:
        environment = {**os.environ, VARIABLE: str(path), EXTENSION: in_script.__name__, STACKS: str(folder)}
        with (folder / LOG).open("ab") as log:
            try:
                process = subprocess.Popen(self._command, env=environment, stdout=log, stderr=subprocess.STDOUT)
            except OSError as error:
                raise ConfigurationError(f"{self._command[0]!r} cannot be run: {error.strerror}.") from error
            try:
                while striker is not None and process.poll() is None and time.monotonic() < deadline:
                    striker.look()
                    time.sleep(_LOOK_S)
                return process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return None
            finally:
                process.kill()  # its ranks end with it
                process.wait()
                if striker is not None:
                    striker.job.end(_END_S)


def _prints(folder: Path) -> list[RankPrint]:
    return read(folder) if (folder / "rank0.jsonl").exists() else []


def _came_to_the_end(prints: list[RankPrint]) -> bool:
    """Return whether every rank has come to the end of the first fit."""
    return bool(prints) and all(0 in rank.ends for rank in prints)


def _struck(folder: Path, prints: list[RankPrint]) -> list[Struck]:
    path = folder / STRUCK
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    found = []
    for record in records:
        fault = InjectedFault.parse(record["fault"])
        found.append(Struck(fault, record["step"], _went_on(prints, record["step"])))
    return found


def _went_on(prints: list[RankPrint], step: int) -> bool:
    """Return whether all ranks have come to the end, or to a step after ``step``."""
    return _came_to_the_end(prints) or min((rank.last_step for rank in prints), default=0) > step


def _ended(code: int | None) -> str:
    if code is None:
        return "it took too long (--timeout-s)"
    return f"it died ({signal_name(-code)})" if code < 0 else f"it ended with exit code {code}"


def _tail(folder: Path) -> str:
    lines = (folder / LOG).read_text(errors="replace").splitlines()[-15:]
    return "\n".join(f"    | {line}" for line in [f"end of {folder / LOG}:", *lines])
