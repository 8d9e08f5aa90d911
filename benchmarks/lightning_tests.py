"""Lightning's own tests with `replica_zero` in place of their strategy: which ones pass, which ones fail, and why.

python benchmarks/lightning_tests.py CHECKOUT            # a checkout of Lightning, at the installed release
python benchmarks/lightning_tests.py CHECKOUT --folders loops checkpointing --out docs/lightning_tests.md

Each test runs four times: with the strategy that Lightning chooses (tests that fail there do not count), with "ddp",
with "replica_zero", and with ``ReplicaZeroStrategy(recovery=False)``. This works only for tests that have a Trainer with
one device that leaves the strategy to Lightning or asks for "ddp"; `lightning_tests_plugin` replaces the strategy. The
results are kept in ``--keep``, and runs that are already there are not repeated.
"""

import argparse
import collections
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning
import torch

HERE = Path(__file__).parent
RUNS = ("auto", "ddp", "replica_zero", "replica_zero_off")
FOLDERS = (
    "loops checkpointing strategies trainer callbacks core models tuner overrides plugins loggers utilities profilers"
)

# Why a test fails that passes under DDP: a pattern of its name or its error, and the reason. The first match counts.
REASONS: list[tuple[str, str]] = [
    (
        "only a new process can train",
        "Expects an error and then trains again in the same process. After an error, this strategy needs a new process.",
    ),
    (
        r"fetching_is_profiled|\[_\w*Loop\]",
        "Looks for the names of Lightning's own loop classes in a profiler's report. Here the loops have other classes.",
    ),
    (
        r"fit_loop\.restarting",
        "Checks a private flag of Lightning (`fit_loop.restarting`) that has no effect here.",
    ),
    (
        "resuming from a checkpoint that ended before",
        "Expects a warning that resuming is not exact. Here resuming is exact.",
    ),
    (
        "test_loop_state_on_exception",
        "Calls a loop's `reset` and checks the state from which Lightning would resume. Here a fit takes the progress of"
        " its loops from a snapshot.",
    ),
    (
        "test_resume_training_with",
        "Counts how often iteration over the data begins. A fit that resumes from a checkpoint begins it twice: when"
        " Lightning sets the data up, and at the position in the checkpoint.",
    ),
    (
        "save_and_restore_dataloaders",
        "Expects a loader's own `state_dict` to be kept. Here the position is a number of batches. So an epoch that"
        " `max_steps` has cut short is over, and the next epoch begins with the first batch.",
    ),
    ("hold the same parameter", "Gives one parameter to two optimizers, which this strategy refuses."),
    (
        r"returned by torch\.save|call_count|name='zero_grad'|type object 'Mock'",
        "Mocks a function that this strategy calls in another way or not at all: torch.save, `Optimizer.zero_grad`, a"
        " callback's methods, a logger's `log_metrics`.",
    ),
    ("PicklingError|can_be_pickled", "Pickles a Trainer after its fit. Here such a Trainer holds connections."),
    ("saved_by_type_stateful", "Has callbacks whose `state_key` is a class, as in old versions of Lightning."),
    ("cannot shard LBFGS", "Trains with LBFGS, which this strategy refuses."),
    ("_ddp_kwargs", "Reads a private attribute of `DDPStrategy`."),
]


def main() -> None:
    """Run the tests and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--folders", nargs="+", default=FOLDERS.split())
    parser.add_argument(
        "--release", default=lightning.__version__, help="release of Lightning that the tests come from"
    )
    parser.add_argument("--keep", type=Path, default=Path("lightning_tests_results"))
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "lightning_tests.md")
    arguments = parser.parse_args()
    arguments.keep.mkdir(exist_ok=True)
    for folder in arguments.folders:
        for run in RUNS:
            _run(arguments.checkout / "tests" / "tests_pytorch", folder, run, arguments.keep)
    results = {run: _read(arguments.keep, run, arguments.folders) for run in RUNS}
    arguments.out.write_text(_report(results, arguments.folders, arguments.release))


def _run(tests: Path, folder: str, run: str, keep: Path) -> None:
    """Run the tests of a folder in one way, unless there is a result already."""
    out = (keep / f"{folder}.{run}.jsonl").resolve()
    if out.exists():
        return
    partial = out.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    paths = [str(HERE), str(HERE.parent), str(tests.parent.resolve())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "LIGHTNING_TESTS_OUT": str(partial)}
    if run != "auto":
        only = out.with_name(f"{folder}.auto.jsonl")
        environment |= {"LIGHTNING_TESTS_STRATEGY": run, "LIGHTNING_TESTS_ONLY": str(only)}
    options = ["-q", "-p", "lightning_tests_plugin", "-p", "no:cacheprovider", "--timeout=300", "--tb=short", "-rN"]
    subprocess.run([sys.executable, "-m", "pytest", *options, folder], cwd=tests, env=environment, check=False)
    partial.touch()
    partial.rename(out)


def _read(keep: Path, run: str, folders: list[str]) -> dict[str, dict[str, Any]]:
    """Return for every test how it ended, what was done with its Trainers, and the error."""
    found: dict[str, dict[str, Any]] = {}
    for folder in folders:
        for line in map(json.loads, (keep / f"{folder}.{run}.jsonl").read_text().splitlines()):
            test = found.setdefault(line["test"], {"folder": folder, "outcome": "passed", "trainers": [], "error": ""})
            test["trainers"] = test["trainers"] or line["trainers"]
            if line["outcome"] != "passed":
                test["outcome"], test["error"] = line["outcome"], test["error"] + line["error"]
    return found


def _report(results: dict[str, dict[str, dict[str, Any]]], folders: list[str], release: str) -> str:
    """Return the page."""
    apply = {
        name: test
        for name, test in results["auto"].items()
        if test["outcome"] == "passed" and "applies" in test["trainers"]
    }
    lines = [
        "# Lightning's own tests",
        "",
        f"tests/tests_pytorch of Lightning {release}, run with lightning {lightning.__version__} and torch"
        f" {torch.__version__} by `benchmarks/lightning_tests.py`. A test applies if it passes unchanged and has a Trainer"
        " with one device that leaves the strategy to Lightning or asks for `ddp`.",
        "",
        "| folder | tests | apply | pass with `ddp` | with `replica_zero` | with `recovery=False` |",
        "|---|---|---|---|---|---|",
    ]
    for folder in [*folders, ""]:
        mine = [name for name in apply if folder in ("", apply[name]["folder"])]
        every = [t for t in results["auto"].values() if folder in ("", t["folder"])]
        passed = [sum(results[run].get(name, {}).get("outcome") == "passed" for name in mine) for run in RUNS[1:]]
        lines.append(f"| {folder or 'all'} | {len(every)} | {len(mine)} | {' | '.join(map(str, passed))} |")
    lines += ["", *_failures(results, apply)]
    return "\n".join(lines) + "\n"


def _failures(results: dict[str, dict[str, dict[str, Any]]], apply: dict[str, Any]) -> list[str]:
    """Return the lines that group the failed tests by reason."""
    why: dict[str, list[str]] = collections.defaultdict(list)
    for name in apply:
        test = results["replica_zero"].get(name, {"outcome": "missing", "error": "the run ended before this test"})
        if test["outcome"] != "passed":
            under_ddp = results["ddp"].get(name, {}).get("outcome") == "passed"
            why[_reason(name, test["error"]) if under_ddp else "Fails under `ddp` too."].append(name)
    lines = ["## What fails", ""]
    for reason, names in sorted(why.items(), key=lambda item: -len(item[1])):
        short = collections.Counter(re.sub(r"\[.*", "", name.removeprefix("tests/tests_pytorch/")) for name in names)
        lines += [f"**{len(names)}: {reason}**", ""]
        lines += [f"- `{name}`" + (f" ({number})" if number > 1 else "") for name, number in short.items()] + [""]
    return lines


def _reason(name: str, error: str) -> str:
    for pattern, reason in REASONS:
        if re.search(pattern, f"{name}\n{error}"):
            return reason
    return "Not explained yet."


if __name__ == "__main__":
    main()
