"""The example, as a user starts it."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support import forked_python

EXAMPLE = Path(__file__).parents[2] / "examples" / "megatron_gpt.py"


def run(out: Path, *options: str, fork: bool = True) -> tuple[str, list[str]]:
    """Runs the example, in a fork of a process that has imported megatron-core, or as a user does."""
    command = [sys.executable, str(EXAMPLE), "--stages=2", "--tensor=1", "--steps=8", f"--result={out}", *options]
    if fork:
        done = forked_python.run(command, out.parent, dict(os.environ), out.with_suffix(".txt"), 200)
    else:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=out.parent)
    assert done.returncode == 0, done.stdout
    return done.stdout, [json.loads((out / f"{rank}.json").read_text()) for rank in range(4)]


def test_a_rank_of_each_stage_is_lost(tmp_path: Path) -> None:
    said, hurt = run(tmp_path / "hurt", "--kill", "1", "2", "--at", "3", fork=False)
    assert "rank 1 kills itself in step 3" in said
    assert "rank 2 kills itself in step 3" in said
    assert "replica_zero: recovered at step 3" in said
    assert "stand-ins for what it asks of CUDA" in said
    assert "Warning" not in said
    assert hurt == run(tmp_path / "untouched")[1]
