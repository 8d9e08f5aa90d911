"""The dying gasp as a user has it: a script, who started it, a signal, and the same command again."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from lightning_replica.checkpoint.directory import CheckpointDirectory
from lightning_replica.exit_codes import GASP_WRITTEN
from tests.launch.test_external import slurm, torchrun
from tests.launch.test_script import SCRIPT, finish, forked, results
from tests.support import forked_python, job, world
from tests.support.forked import ForkedProcess
from tests.support.forked_python import ForkedPython
from tests.support.job import Case, Fault
from tests.support.ranks import free_port

LINE = [sys.executable, str(SCRIPT)]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    done = forked(tmp_path_factory.mktemp("untouched"), "none", 0)
    assert len(results(done.stdout)) == 2, done.stdout
    return results(done.stdout)


@pytest.mark.parametrize("fixture", ["tmp_path", pytest.param("bucket", marks=pytest.mark.combinations)])
def test_sigterm_and_the_same_command_again(
    fixture: str, untouched: dict[str, str], request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Rank 0 waits inside of its step until it has heard; the other is in a collective."""
    place, folder = request.getfixturevalue(fixture), tmp_path_factory.mktemp("outputs")
    line, first = [*LINE, "wait", "0"], folder / "first"
    process = ForkedPython(line, str(folder), environment(GASP=str(place)), str(first))
    while "waiting" not in (first.read_text() if first.exists() else ""):
        assert process.poll() is None, first.read_text()
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    code, output = process.wait(200), first.read_text()
    assert code == GASP_WRITTEN, output
    assert "SIGTERM: all ranks save and end, within 25 s." in output
    assert f"the run has ended early and has left {place}/step_00000003" in output
    assert "Traceback" not in output
    again = forked_python.run(line, folder, environment(GASP=str(place)), folder / "again", 200)
    assert again.returncode == 0, again.stdout
    assert again.stdout.count(f"resumes from {place}/step_00000003.") == 1
    assert results(again.stdout) == untouched


def test_torchrun_restarts_all_ranks(untouched: dict[str, str], tmp_path: Path) -> None:
    """Rank 1 raises, and is killed; the other saves within torchrun's grace, and all go on from there."""
    process = torchrun("raise and kill", "1", GASP=str(tmp_path))
    output = finish(process)
    assert process.returncode == 0, output
    assert "recovered at step 2" in output, output
    assert output.count(f"resumes from {tmp_path}/step_00000003.") == 1
    assert results(output) == untouched


def test_slurm_tells_all_ranks(tmp_path: Path) -> None:
    """One is lost; the others are told to end, come together by themselves and save."""
    whole = world.run(Case(), tmp_path / "untouched")
    out, port = tmp_path / "run", free_port()
    out.mkdir()
    case = Case((Fault("kill", 3, "update", 2),), gasp=True)
    processes = []
    for rank in range(4):
        variables = {**slurm(rank, port), "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "4", "OMP_NUM_THREADS": "1"}
        processes.append(ForkedProcess({**os.environ, **variables}, out / f"log{rank}", job.run, case, out))
    processes[3].wait()
    for survivor in processes[:3]:
        survivor.send_signal(signal.SIGTERM)
    codes = [survivor.wait() for survivor in processes[:3]]
    assert codes == [GASP_WRITTEN] * 3, "".join((out / f"log{rank}").read_text() for rank in range(4))
    left = CheckpointDirectory(out / "gasp").latest(verify=True)
    world.run(Case(gasp=True, load=str(left.path)), out).assert_same(whole)
