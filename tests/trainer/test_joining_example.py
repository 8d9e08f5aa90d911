"""`examples/uneven_inputs.py`: a rank that dies when it has no inputs any more comes back."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "uneven_inputs.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE), "--width", "40", "--depth", "1", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def said(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What ranks have printed; two may write into one line at the same time."""
    return sorted(re.findall(r"rank \d: \d+ of \d+ steps without inputs|loss .*", done.stdout))


def test_a_shadow_dies() -> None:
    untouched, killed = run(), run("--kill", "0", "--at", "9")
    assert "Rank 0 died (SIGKILL); a new process takes its place" in killed.stdout + killed.stderr
    assert said(killed) == said(untouched)
    assert "rank 0: 4 of 10 steps without inputs" in untouched.stdout
    assert "rank 1: 0 of 10 steps without inputs" in untouched.stdout
