"""Lightning's own tests with `replica_zero` in place of the strategy that they would get: what passes, what fails and why.

python benchmarks/lightning_tests.py CHECKOUT            # of Lightning, at the release that is installed
python benchmarks/lightning_tests.py CHECKOUT --folders loops checkpointing --out docs/lightning_tests.md

Each test runs four times: with the strategy that Lightning chooses (what fails there is not counted), with "ddp", with
"replica_zero", and with ``ReplicaZeroStrategy(recovery=False)``. Only tests whose Trainers have one device and leave the
strategy to Lightning, or ask for "ddp", can be run so; `lightning_tests_plugin` replaces it. Results are kept in
``--keep``, and a run that is there already is not made again.
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

# Why a test fails that passes under DDP: a pattern of its name or its error, and what to say. The first that fits holds.
REASONS: list[tuple[str, str]] = [
    ("one process fails only once", "Expects an error, and trains on in the same process: it must be started again."),
    (
        r"fetching_is_profiled|\[_\w*Loop\]",
        "Looks for the names of Lightning's own loop classes in a profiler's report.",
    ),
    (r"fit_loop\.restarting", "Looks at a private mark of Lightning's, by which nothing is steered here."),
    ("resuming from a checkpoint that ended before", "Expects a warning that resuming is not exact. Here it is."),
    (
        "test_loop_state_on_exception",
        "Calls a loop's `reset` by itself and looks at what it leaves to Lightning's resuming. Here the snapshot that the"
        " fit goes on from says where the loops stand.",
    ),
    (
        "test_resume_training_with",
        "Counts how often data is begun. A fit that goes on from a checkpoint begins it twice: as Lightning sets it up, and"
        " where the checkpoint says.",
    ),
    (
        "save_and_restore_dataloaders",
        "The state that a loader tells in its own `state_dict` is not kept: a number of batches says where it stands. So an"
        " epoch that `max_steps` has cut short is over, and the next one begins with the first batch.",
    ),
    ("hold the same parameter", "Gives a parameter to two optimizers, which is refused."),
    (
        r"returned by torch\.save|call_count|name='zero_grad'|type object 'Mock'",
        "Puts a mock in place of what this strategy calls in another way, or not: torch.save, `Optimizer.zero_grad`, a"
        " callback's methods, a logger's `log_metrics`.",
    ),
    ("PicklingError|can_be_pickled", "Pickles a Trainer after its fit, which holds connections here."),
    ("saved_by_type_stateful", "Has callbacks whose `state_key` is a class, as those of old versions of Lightning."),
    ("cannot shard LBFGS", "Trains with LBFGS, which is refused."),
    ("_ddp_kwargs", "Looks at a private attribute of `DDPStrategy`."),
]


def main() -> None:
    """Runs and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--folders", nargs="+", default=FOLDERS.split())
    parser.add_argument("--release", default=lightning.__version__, help="of Lightning, that the tests are of")
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
    """Runs the tests of a folder in one way, unless that has been done."""
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
    """By test: how it ended, what its Trainers were given, and the error."""
    found: dict[str, dict[str, Any]] = {}
    for folder in folders:
        for line in map(json.loads, (keep / f"{folder}.{run}.jsonl").read_text().splitlines()):
            test = found.setdefault(line["test"], {"folder": folder, "outcome": "passed", "trainers": [], "error": ""})
            test["trainers"] = test["trainers"] or line["trainers"]
            if line["outcome"] != "passed":
                test["outcome"], test["error"] = line["outcome"], test["error"] + line["error"]
    return found


def _report(results: dict[str, dict[str, dict[str, Any]]], folders: list[str], release: str) -> str:
    """The page."""
    apply = {
        name: test
        for name, test in results["auto"].items()
        if test["outcome"] == "passed" and "applies" in test["trainers"]
    }
    lines = [
        "# Lightning's own tests",
        "",
        f"tests/tests_pytorch of Lightning {release} with lightning {lightning.__version__} and torch {torch.__version__}."
        " Made by `benchmarks/lightning_tests.py`, which says how. A test applies if its Trainers have one device and leave"
        " the strategy to Lightning, and if it passes as it is.",
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
    """Why tests fail, and which."""
    why: dict[str, list[str]] = collections.defaultdict(list)
    for name in apply:
        test = results["replica_zero"].get(name, {"outcome": "missing", "error": "the run ended before it"})
        if test["outcome"] != "passed":
            under_ddp = results["ddp"].get(name, {}).get("outcome") == "passed"
            why[_reason(name, test["error"]) if under_ddp else "They fail under `ddp` too."].append(name)
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
