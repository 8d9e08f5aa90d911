"""Runs torch's and FairScale's own tests of their sharded optimizers against `ReplicaOptimizer`.

    python -m tests.upstream.run FOLDER    # writes docs/zero_redundancy_tests.md

FOLDER holds their files, unchanged: ``test_zero_redundancy_optimizer.py`` of pytorch's test/distributed/optim, and
``test_oss.py`` of FairScale's tests/optim, which needs ``pip install fairscale``. No package has these files, so they
come from checkouts. `test_upstream` runs them, too, where ``LIGHTNING_REPLICA_UPSTREAM`` names such a folder.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TypeAlias

import torch

from tests.upstream import adapters, expected, plugin

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "zero_redundancy_tests.md"
FILES = {"test_zero_redundancy_optimizer.py": "torch", "test_oss.py": "FairScale"}
OWN = "own"
SUBJECTS = {OWN: 1, "R=1": 1, "R=2": 2}
"""What the tests were written for; and `ReplicaOptimizer` with one and with two holders of every shard."""

INTRODUCTION = f"""# torch's and FairScale's own tests

The tests of `ZeroRedundancyOptimizer` (torch's test/distributed/optim/test_zero_redundancy_optimizer.py) and of `OSS` (FairScale's
tests/optim/test_oss.py) against [`ReplicaOptimizer`](replica_optimizer.md) under their names and with their arguments
(`tests/upstream/adapters.py`): with torch {torch.__version__}, on CPUs over gloo, with up to {plugin.RANKS} ranks, and R holders of every shard
where R divides the number of ranks. Decorators that ask for GPUs are lifted where a test runs without. In the column "own" stands
how the optimizer for which the test was written fares in the same way. torch's file is not that of the installed release: it is that of
commit 0807990d, restored from a fork, and may differ in a character or two.

`python -m tests.upstream.run FOLDER` writes this page. The files are in no package, and are not copied here.
`tests/upstream/test_upstream.py` runs them where `LIGHTNING_REPLICA_UPSTREAM` names a folder that has them, and fails if one ends
otherwise than this page says. What they ask for is asked again, in other words and everywhere, by
`tests/sharding/test_as_zero_redundancy.py` and `tests/sharding/test_replica_optimizer.py`.
"""  # noqa: E501

Outcomes: TypeAlias = dict[str, tuple[str, str]]
"""How each test ended, and its error."""


def outcomes(file: Path, subject: str, timeout_s: int = 60) -> Outcomes:
    """Run a file in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.jsonl"
        out.touch()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "TMPDIR": folder,
            plugin.OUT: str(out),
            plugin.SUBJECT: OWN if subject == OWN else "replica",
            adapters.REPLICAS: str(SUBJECTS[subject]),
        }
        options = ["-q", "-p", "tests.upstream.plugin", "-p", "no:cacheprovider", f"--timeout={timeout_s}", "-rN"]
        command = [sys.executable, "-m", "pytest", *options, "-c", os.devnull, "--rootdir", folder, str(file.resolve())]
        done = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, check=False)
        lines = [json.loads(line) for line in out.read_text().splitlines()]
    if done.returncode not in (0, 1) or not lines:
        raise RuntimeError(f"pytest could not run {file}:\n{done.stdout}\n{done.stderr}")
    return {line["test"]: (line["outcome"], line["error"]) for line in lines}


def page(results: dict[str, dict[str, Outcomes]]) -> str:
    """Return the page, of the outcomes by file and subject."""
    header = ["", "test", *SUBJECTS, "why"]
    lines = [INTRODUCTION, f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for file, by_subject in results.items():
        for name, group in grouped(list(by_subject["R=1"])).items():
            cells = [summary([by_subject[subject][test][0] for test in group]) for subject in SUBJECTS]
            lines.append(f"| {FILES[file]} | `{name}` | {' | '.join(cells)} | {expected.reason(group[0], 2)[1]} |")
    return "\n".join(lines) + "\n"


def grouped(tests: list[str]) -> dict[str, list[str]]:
    """Return the tests by name without parameters, as far as they are expected to end in one way."""
    found: dict[str, list[str]] = {}
    for test in tests:
        bare = re.sub(r"\[.*|_(use_gpu|gradient_as|maximize|optimizer_class|parameters_as)_.*", "", test)
        short = bare.removeprefix("TestZeroRedundancyOptimizer").replace("::", ": ")
        key = short if expected.reason(test) == expected.reason(bare) else test
        found.setdefault(key, []).append(test)
    return found


def summary(ended: list[str]) -> str:
    """Return how tests ended, with their number if there are several."""
    counts = {outcome: ended.count(outcome) for outcome in sorted(set(ended), reverse=True)}
    return ", ".join(outcome if len(ended) == 1 else f"{count} {outcome}" for outcome, count in counts.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    results = {file: {subject: outcomes(folder / file, subject) for subject in SUBJECTS} for file in FILES}
    PAGE.write_text(page(results))
    for file, by_subject in results.items():
        for subject, tests in by_subject.items():
            for test, (outcome, error) in tests.items():
                if subject != OWN and outcome != expected.reason(test, SUBJECTS[subject])[0]:
                    print(f"{file} {subject} {test}: {outcome}\n{error}")


if __name__ == "__main__":
    main()
