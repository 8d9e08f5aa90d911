"""The example, as a user starts it."""

import json
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "megatron_gpt.py"


def run(out: Path, *options: str) -> tuple[str, list[str]]:
    command = [sys.executable, str(EXAMPLE), "--stages=2", "--tensor=1", "--steps=8", f"--result={out}", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=out.parent)
    assert done.returncode == 0, done.stdout
    return done.stdout, [json.loads((out / f"{rank}.json").read_text()) for rank in range(4)]


def test_a_rank_of_each_stage_is_lost(tmp_path: Path) -> None:
    said, hurt = run(tmp_path / "hurt", "--kill", "1", "2", "--at", "3")
    assert "rank 1 kills itself in step 3" in said
    assert "rank 2 kills itself in step 3" in said
    assert "replica_zero: recovered at step 3" in said
    assert "stand-ins for what it asks of CUDA" in said
    assert "Warning" not in said
    assert hurt == run(tmp_path / "untouched")[1]
