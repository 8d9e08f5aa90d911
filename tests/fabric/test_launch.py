"""The example as users start it: with `python`, with torchrun, and a function in processes of Fabric's own."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.test_examples import EXAMPLES, fingerprint, run, search_path
from tests.launch.test_script import finish

TINY = ["--devices", "2", "--width", "20", "--depth", "1", "--steps", "8"]


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("untouched")
    done = run(folder, "fabric.py", *TINY)
    assert "replica_zero:" not in done.stdout
    assert not list(folder.iterdir())
    return fingerprint(done)


def test_torchrun_starts_all_ranks_again(untouched: str, tmp_path: Path) -> None:
    """Rank 1 is killed in step 5. All begin again at the last checkpoint, and end with the same bits.

    That is of step 6 if rank 0, which has all of the state, has still got there: all gradients were reduced.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    options = ["--checkpoint", str(tmp_path / "run.pt"), "--every", "2", "--kill", "1", "--at", "5"]
    process = subprocess.Popen(
        [sys.executable, *launcher, str(EXAMPLES / "fabric.py"), *TINY, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": search_path()},
        start_new_session=True,
    )
    output = finish(process)
    assert process.returncode == 0, output
    assert "rank 1 kills itself in step 5" in output
    assert re.search("^resumed at step [46]$", output, re.M)
    assert re.findall(r"^fingerprint (\w+)$", output, re.M) == [untouched]
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]


def test_a_killed_rank_ends_the_run_with_advice(tmp_path: Path) -> None:
    done = run(tmp_path, "fabric.py", *TINY, "--kill", "1", "--at", "3")
    assert done.returncode in (1, -signal.SIGKILL), done.stdout
    assert "RecoveryError: The reduction of gradients has failed" in done.stdout or "optimizer's step" in done.stdout
    assert "Rank 1 is gone: the process has ended." in done.stdout
    assert "such as `torchrun --max-restarts=3`" in done.stdout


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_processes_that_run_a_function(start_method: str, tmp_path: Path) -> None:
    script = Path(__file__).with_name("launch_script.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": search_path()}
    line = [sys.executable, str(script), start_method]
    # In a new Python: where torch is built for CUDA, a process that was forked may fork no more.
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done
    assert "('hello', 2, (0, 1))" in done.stdout.splitlines(), done
    assert "groups are open" not in done.stdout, "a thread of gloo's may abort the process at its end"
    assert done.stdout.count("groups are closed") == (3 if start_method == "spawn" else 1)  # forks end without hooks
