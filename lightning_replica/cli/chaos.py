"""``lightning-replica chaos``: runs a user's script untouched and with faults, and compares the runs bit by bit."""

import argparse
from typing import Any, cast

from lightning_replica.chaos.experiment import Experiment
from lightning_replica.chaos.experiments import Laboratory, Result, Struck
from lightning_replica.chaos.fault_points import FAULT_POINTS
from lightning_replica.chaos.faults import KINDS, Dice, InjectedFault, parse_all
from lightning_replica.chaos.outside import ROLES, SIGNALS, Hit, Strike, draw
from lightning_replica.cli.script_runs import NOT_STRUCK, add_options, command_of, counted, folder_for
from lightning_replica.core import checks
from lightning_replica.core.output import table, write
from lightning_replica.core.points import PHASES
from lightning_replica.errors import ConfigurationError

_USUAL_SIGNALS, _USUAL_TARGETS = "kill,stop,segv", "rank,worker,standby"
_USUAL_KINDS = "kill,exception,exit,memory,hang,corrupt"
# In runs with faults. A flipped bit is found in its step; steps of the scripts that users try this with are short.
_OPTIONS = {"guard": "full", "hang_min_s": 5.0, "hang_max_s": 120.0}
_EPILOG = f"""\
examples:
  lightning-replica chaos -- python train.py
  lightning-replica chaos --runs 5 --faults 4 --seed 1 --out chaos -- python train.py --steps 100
  lightning-replica chaos --outside 10 --targets rank,worker,supervisor -- python train.py
  lightning-replica chaos --list kill:2:forward:30,exception:0:update:31 -- python train_cli.py fit -c train.yaml

The script runs as it is, with `strategy="replica_zero"`; nothing is added to it. It must start from scratch each
time: if it resumes from a checkpoint of its own, it finds that of the run before. The command compares the weights,
every rank's shard of the optimizer state, its random numbers and the batches that it saw, after every step and at the
end of `fit`; at the end, it also compares schedulers and metrics. Random faults leave enough time to recover in
between, so all of them are survivable.

With --outside, this command itself sends signals at random times to random processes of the job, whatever they are
doing. A "worker" is any process that a rank has started, above all a DataLoader worker. The supervisor is hit only if
--targets names it: the job then ends with it and is started again. "stop" never hits the supervisor, and "term" hits
only the supervisor.

signals: {", ".join(SIGNALS)}
targets: {", ".join(ROLES)}
kinds:   {", ".join(KINDS)}
points:  {", ".join(FAULT_POINTS[:7])},
         {", ".join(FAULT_POINTS[7:15])},
         {", ".join(FAULT_POINTS[15:20])},
         {", ".join(FAULT_POINTS[20:])}

Exit code: 0 if every fault has struck and every run ends with the bits of the untouched one, 1 if one differs, 2 if one
fails, 3 if nothing differs and nothing fails, but a fault was not reached, or there was none: then little is proven.
"""


def add_parser(commands: Any) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "chaos",
        help="does your own training survive faults, to the last bit?",
        description="Runs a training script untouched, then with faults, and compares them bit by bit.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="lightning-replica chaos [options] -- python train.py ...",
    )
    parser.add_argument("--runs", type=int, default=1, metavar="K", help="runs with faults, each with its own seed (1)")
    many = parser.add_mutually_exclusive_group()
    many.add_argument("--faults", type=int, metavar="N", help="random faults in each run (3)")
    many.add_argument("--mtbf-steps", type=float, metavar="STEPS", help="or one fault every STEPS steps, on average")
    many.add_argument("--outside", type=int, metavar="N", help="or N signals from outside, to any process of the job")
    many.add_argument("--list", metavar="FAULTS", help="or these faults: kind:rank:point:step, separated by commas")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run's faults (0)")
    parser.add_argument("--kinds", default=_USUAL_KINDS, help=f"kinds of random faults ({_USUAL_KINDS})")
    parser.add_argument("--points", help="points where they strike (all that the script reaches)")
    parser.add_argument("--signals", default=_USUAL_SIGNALS, help=f"signals that --outside sends ({_USUAL_SIGNALS})")
    parser.add_argument("--targets", default=_USUAL_TARGETS, help=f"processes that --outside hits ({_USUAL_TARGETS})")
    parser.add_argument("--every-n-steps", type=int, default=1, metavar="N", help="compare every N steps (1)")
    add_options(parser, timeout_s=3600.0)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the script untouched and with faults, and return the exit code.

    Raises:
        ConfigurationError: If options are invalid, or the script cannot be tested.
    """
    command = command_of(options.command, "chaos")
    checks.whole(1, runs=options.runs, every_n_steps=options.every_n_steps)
    checks.whole(1, faults=3 if options.faults is None else options.faults)
    checks.seconds(timeout_s=options.timeout_s)
    checks.positive("mtbf_steps", options.mtbf_steps)
    listed = None if options.list is None else parse_all(options.list)
    if listed == ():
        raise ConfigurationError("--list is empty: name a fault, for example kill:1:forward:3.")
    _dice(options, 0, FAULT_POINTS)
    if options.outside is not None:
        checks.whole(1, outside=options.outside)
        _strikes(options, 0, 1)
    results: list[Result] = []
    with folder_for(options.out, "chaos", lambda: _all_identical(results)) as folder:
        base = Experiment("", every_n_steps=options.every_n_steps)
        results = _series(Laboratory(command, folder, base, options.timeout_s, _OPTIONS), options, listed)
    verdicts = {each.verdict for each in results}
    if not verdicts & {"failed", "different"} and (any(each.missed for each in results) or not _any_struck(results)):
        return NOT_STRUCK
    return 2 if "failed" in verdicts else 1 if "different" in verdicts else 0


def _all_identical(results: list[Result]) -> bool:
    return bool(results) and all(each.verdict == "identical" for each in results)


def _any_struck(results: list[Result]) -> bool:
    return any(each.struck for each in results)


def _dice(options: argparse.Namespace, number: int, points: tuple[Any, ...]) -> Dice:
    chosen = points if options.points is None else _words(options.points)
    return Dice(options.seed + number, cast("Any", _words(options.kinds)), cast("Any", chosen))


def _strikes(options: argparse.Namespace, number: int, steps: int) -> list[Strike]:
    signals, roles = cast("Any", _words(options.signals)), cast("Any", _words(options.targets))
    return draw(options.seed + number, options.outside, steps, signals, roles)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _series(
    laboratory: Laboratory, options: argparse.Namespace, listed: tuple[InjectedFault, ...] | None
) -> list[Result]:
    write("untouched: running ...")
    laboratory.leave_alone()
    write(f"untouched: {counted(laboratory.ranks, 'rank')}, {counted(laboratory.steps, 'step')}")
    usual = tuple(point for point in FAULT_POINTS if point in laboratory.last or point in PHASES)
    results = []
    for number in range(options.runs):
        result = _hurt(laboratory, options, number, listed, usual)
        write(f"run {number + 1}: {counted(len(result.struck), 'fault')} struck, {result.verdict}")
        results.append(result)
    write("\n" + _report(results))
    if any(result.verdict == "different" for result in results):
        write(_blame(laboratory.repeat()))
    write(summary(results))
    return results


def _hurt(
    laboratory: Laboratory,
    options: argparse.Namespace,
    number: int,
    listed: tuple[InjectedFault, ...] | None,
    usual: tuple[Any, ...],
) -> Result:
    name = f"run-{number + 1}"
    if options.outside is not None:
        strikes = _strikes(options, number, laboratory.steps)
        write(f"run {number + 1}: {counted(len(strikes), 'signal')} from outside, running ...")
        return laboratory.strike(name, strikes, cast("Any", _words(options.targets)))
    if listed is None:
        count = None if options.mtbf_steps is not None else options.faults or 3
        faults = tuple(laboratory.draw(_dice(options, number, usual), count, options.mtbf_steps))
    else:
        faults = listed
    write(f"run {number + 1}: {counted(len(faults), 'fault')}, running ...")
    return laboratory.hurt(name, faults, spaced=listed is None)


def _report(results: list[Result]) -> str:
    rows = []
    for number, result in enumerate(results, 1):
        rows += [
            [str(number), str(each.fault), _when(each), _then(each, result), result.verdict] for each in result.struck
        ]
        rows += [[str(number), str(fault), "not reached", "-", "-"] for fault in result.missed]
    lines = [table(["run", "fault", "struck at", "then", "result"], rows, left=True)]
    for number, result in enumerate(results, 1):
        lines += [f"run {number}: {text}" for text in (result.failure, *result.differences) if text]
    return "\n".join(lines)


def _when(struck: Struck) -> str:
    return f"step {struck.step}" + (f", {struck.fault.at_s:.1f} s" if isinstance(struck.fault, Hit) else "")


def _then(struck: Struck, result: Result) -> str:
    if struck.fault.kind == "sigterm" and not result.failure:
        return "stopped"
    if not struck.recovered:
        return "NOT recovered"
    ended = isinstance(struck.fault, Hit) and struck.fault.role == "supervisor"
    return "started again" if ended else "recovered"


def _blame(found: list[str]) -> str:
    if found:
        lines = [f"    {text}" for text in found[:3]]
        return "\n".join(
            ["Two untouched runs differ as well: the script itself is not deterministic. Seed everything"]
            + [
                "(`lightning.seed_everything(1, workers=True)`) and let no random number depend on time or process.",
                *lines,
            ]
        )
    return (
        "Two untouched runs are identical: the difference comes from recovery. Please report it, with the folder below."
    )


def summary(results: list[Result]) -> str:
    """Return a summary of all results in one line."""
    struck = sum(len(result.struck) for result in results)
    missed = sum(len(result.missed) for result in results)
    runs = f"{counted(struck, 'fault')} in {counted(len(results), 'run')}"
    counts = {verdict: sum(result.verdict == verdict for result in results) for verdict in ("different", "failed")}
    bad = ", ".join(f"{counted(number, 'run')} {verdict}" for verdict, number in counts.items() if number)
    rest = f" ({missed} more {'was' if missed == 1 else 'were'} not reached)" if missed else ""
    return f"{runs}, {bad or 'all bit-identical'}{rest}"
