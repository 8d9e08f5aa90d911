"""``lightning-replica verify``: proves on a user's own training that a recovery comes back to the same bits."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_replica.chaos.experiment import INCIDENTS, Experiment
from lightning_replica.chaos.experiments import Laboratory, Result
from lightning_replica.chaos.faults import InjectedFault
from lightning_replica.cli.script_runs import NOT_STRUCK, add_options, command_of, counted, folder_for
from lightning_replica.core import checks
from lightning_replica.core.output import table, write
from lightning_replica.errors import ConfigurationError
from lightning_replica.recovery.incident import Incident

_STEPS = 6
_EPILOG = """\
examples:
  lightning-replica verify -- python train.py
  lightning-replica verify --steps 12 --out proof -- python train_cli.py fit -c train.yaml

The script runs as it is, with its own settings, and each fit ends after some steps. It must train with
`strategy="replica_zero"` on two ranks or more, and start from scratch each time (`resume="auto"` has no effect here).
It runs twice untouched; then with each batch done again, with each end of a batch done again, with rank 0 and rank 1
replaced, and stopped by SIGTERM and resumed. After each step, these are compared with the untouched run: weights, every
rank's shard of the optimizer state, random numbers, data, and all that modules, callbacks and the data module hold.
After a resume, the data and the end of the fit are compared.

Exit code: 0 if all runs have the bits of the untouched one: proven, for these steps; 1 if one differs; 2 if the script
cannot be tested or a run fails; 3 if nothing differs, but something could not be tried.
"""


@dataclass(frozen=True)
class Trial:
    """One kind of fault that is tried.

    Attributes:
        name: What is tried, for people.
        run: Runs it; None if it cannot be tried.
        why: Why it cannot be tried.
    """

    name: str
    run: Callable[[], Result] | None
    why: str = ""


def add_parser(commands: Any) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "verify",
        help="proves on your own training that a recovery is exact",
        description="Runs a training script untouched and with one fault after the other, and compares every step.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="lightning-replica verify [options] -- python train.py ...",
    )
    parser.add_argument("--steps", type=int, default=_STEPS, metavar="N", help=f"steps in each fit ({_STEPS})")
    add_options(parser, timeout_s=1800.0)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the script again and again, and return the exit code.

    Raises:
        ConfigurationError: If options are invalid, or the script cannot be tested.
    """
    command = command_of(options.command, "verify")
    checks.whole(3, steps=options.steps)
    checks.seconds(timeout_s=options.timeout_s)
    results: list[tuple[Trial, Result | None]] = []
    whole = False
    with folder_for(options.out, "verify", lambda: whole) as folder:
        base = Experiment("", objects=True, max_steps=options.steps, anew=True)
        laboratory = Laboratory(command, folder, base, options.timeout_s)
        _untouched(laboratory)
        for trial in trials(laboratory):
            write(f"{trial.name}: {'running ...' if trial.run else trial.why}")
            results.append((trial, trial.run() if trial.run else None))
        whole = all(result is None or result.verdict == "identical" for _, result in results)
    write("\n" + report(laboratory, results))
    return code_of([result for _, result in results])


def _untouched(laboratory: Laboratory) -> None:
    write("untouched: running ...")
    laboratory.leave_alone()
    write("untouched once more: running ...")
    found = laboratory.repeat()
    if found:
        lines = "\n".join(f"    {text}" for text in found[:3])
        raise ConfigurationError(
            "Two untouched runs differ, so the script itself is not deterministic, and nothing can be proven. Seed"
            " everything (`lightning.seed_everything(1, workers=True)`), and let nothing depend on time or process. On"
            f" GPUs, add `Trainer(deterministic=True)`.\n{lines}"
        )


def trials(laboratory: Laboratory) -> list[Trial]:
    """Return what is tried with a script that has run untouched."""
    steps, ranks = laboratory.steps, laboratory.ranks
    middle = (steps - 1) // 2  # ranks that are told to stop do so one step later

    def with_faults(name: str, folder: str, faults: Sequence[InjectedFault]) -> Trial:
        return Trial(name, lambda: laboratory.hurt(folder, faults, spaced=False))

    alone = "" if ranks > 1 else "the script trains on one rank, which has no peer"
    found = [
        with_faults(
            "each batch done again",
            "batches",
            [InjectedFault("exception", step % ranks, "before_commit", step) for step in range(steps)],
        ),
        with_faults(
            "each end of a batch done again",
            "tails",
            [InjectedFault("exception", step % ranks, "train_batch_end", step) for step in range(1, steps + 1)],
        ),
    ]
    for rank, point in ((0, "forward"), (1, "train_batch_end")):
        name = f"rank {rank} replaced"
        fault = InjectedFault("kill", min(rank, ranks - 1), point, middle)  # type: ignore[arg-type]
        found.append(Trial(name, None, alone) if alone else with_faults(name, f"replaced-{rank}", [fault]))
    stop = InjectedFault("sigterm", 0, "train_batch_end", middle)
    found.append(Trial("stopped and resumed", lambda: laboratory.stop_and_resume("stopped", stop)))
    return found


def report(laboratory: Laboratory, results: Sequence[tuple[Trial, Result | None]]) -> str:
    """Return a table of all results, and what differs."""
    rows = [
        [trial.name, *(("-", "not tried") if result is None else (str(len(result.struck)), _verdict(result)))]
        for trial, result in results
    ]
    lines = [table(["tried", "faults", "result"], rows, left=True)]
    for trial, result in results:
        if result is None:
            lines.append(f"{trial.name}: {trial.why}")
            continue
        lines += [f"{trial.name}: {text}" for text in (result.failure, *result.differences) if text]
        lines += [f"{trial.name}: {fault} was not reached" for fault in result.missed]
    said = {line: None for _, result in results if result is not None for line in _inexact(result)}
    if said:
        lines += ["The training itself has said what is not exact:", *(f"    {line}" for line in said)]
    if laboratory.varying:
        lines += ["Not compared, because two untouched runs differ in it as well:"]
        lines += [f"    {name}" for name in sorted(laboratory.varying)]
    if any(result is not None and result.differences for _, result in results):
        lines.append(
            "Two untouched runs are identical: the difference comes from recovery. State in an attribute of the module,"
            " of a callback or of the data module is restored; a global, a class attribute or the memory of a C library"
            " is not. If it is none of these, please report it, with the folder above."
        )
    steps = f"{counted(laboratory.steps, 'step')} on {counted(laboratory.ranks, 'rank')}"
    code = code_of([result for _, result in results])
    proven = {0: "proven: every run has the bits of the untouched one", NOT_STRUCK: "not all could be tried"}
    return "\n".join([*lines, f"{steps}, {proven.get(code, 'NOT proven')}"])


def code_of(results: Sequence[Result | None]) -> int:
    """Return the exit code."""
    verdicts = {None if result is None else result.verdict for result in results}
    if "failed" in verdicts:
        return 2
    if "different" in verdicts:
        return 1
    return NOT_STRUCK if any(result is None or result.missed for result in results) else 0


def _verdict(result: Result) -> str:
    return "not reached" if result.verdict == "identical" and not result.struck else result.verdict


def _inexact(result: Result) -> list[str]:
    path = result.folder / INCIDENTS
    if not path.exists():
        return []
    incidents = [Incident.of_json(line) for line in path.read_text().splitlines()]
    return [f"{name}: {why}" for incident in incidents for name, why in incident.inexact.items()]
