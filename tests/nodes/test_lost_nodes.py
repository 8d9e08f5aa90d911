"""A node is lost, a spare takes its place, and the bits are those of one undisturbed machine."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_replica.exit_codes import GASP_WRITTEN, GAVE_UP
from tests.support.machines import NEEDS_ROOT, Machine, machines

SCRIPT = Path(__file__).with_name("script.py")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
STEPS = 400
# As in a task of `srun`: what Lightning would read there says nothing about our ranks.
SLURM = {"SLURM_NTASKS": "3", "SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "train", "SLURM_LOCALID": "0"}


def run_alone(out: Path) -> None:
    """Runs on one machine, from the checkpoint in ``out`` if there is one."""
    command = [sys.executable, str(SCRIPT), str(out), "1", "-1", str(STEPS)]
    done = subprocess.run(command, cwd=out, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def results(out: Path) -> list[str]:
    return [path.read_text() if path.exists() else "" for path in (out / f"rank{rank}" for rank in range(4))]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The oracle: four ranks on one machine."""
    out = tmp_path_factory.mktemp("alone")
    run_alone(out)
    found = results(out)
    assert all(result.startswith(f"{STEPS} ") for result in found)
    assert len(set(found)) == 4  # each rank has random numbers and batches of its own
    return found


def start(nodes: list[Machine], out: Path, *options: str) -> None:
    """Starts the run on all nodes; the first serves the store, and the last comes too late for a slot."""
    for number, node in enumerate(nodes):
        flags = ["--nnodes", "2", "--spares", "1", "--nproc-per-node", "2", *options]
        command = [sys.executable, "-m", "lightning_replica", "run", *flags]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{nodes[0].address}:29500"]
        log, slurm = out / f"log{number}", {**SLURM, "SLURM_PROCID": str(number), "SLURM_NODEID": str(number)}
        node.start([*command, str(SCRIPT), str(out), "2", "150", str(STEPS)], log, {**ENVIRONMENT, **slurm})
        if number == 1:
            until(lambda: logs(out, nodes).count("has ranks") == 2, nodes, out)


def until(ready: Callable[[], bool], nodes: list[Machine], out: Path) -> None:
    while not ready():
        for node in nodes:
            assert node.process is None or node.process.poll() is None, logs(out, nodes)
        time.sleep(0.01)


def logs(out: Path, nodes: list[Machine]) -> str:
    found = [out / f"log{number}" for number in range(len(nodes))]
    return "".join(f"--- {path.name}\n{path.read_text()}" for path in found if path.exists())


def code(node: Machine) -> int:
    assert node.process is not None
    return node.process.wait(120)


@NEEDS_ROOT
@pytest.mark.parametrize("fault", ["killed", "link down"])
def test_a_spare_takes_over(fault: str, alone: list[str], tmp_path: Path) -> None:
    with machines(3) as nodes:
        start(nodes, tmp_path, "--node-timeout", "6")
        until((tmp_path / "now").exists, nodes, tmp_path)
        if fault == "killed":
            nodes[1].kill()
        else:
            nodes[1].link("down")
            assert code(nodes[1]) == GAVE_UP, logs(tmp_path, nodes)
        assert [code(nodes[0]), code(nodes[2])] == [0, 0], logs(tmp_path, nodes)
        text = logs(tmp_path, nodes)
        assert "Node machine1, with ranks [2, 3], is lost; node machine2 takes its place (1 of 3)." in text
        assert ("has not answered for 4.8 s. The ranks of node machine1 are killed" in text) == (fault == "link down")
        assert results(tmp_path) == alone, text
        where = [(tmp_path / f"node{rank}").read_text() for rank in range(4)]
        assert where == ["machine0", "machine0", "machine2", "machine2"]


@NEEDS_ROOT
def test_the_node_with_the_store_is_killed(alone: list[str], tmp_path: Path) -> None:
    with machines(3) as nodes:
        start(nodes, tmp_path, "--node-timeout", "20")
        until((tmp_path / "now").exists, nodes, tmp_path)
        nodes[0].kill()
        assert [code(nodes[1]), code(nodes[2])] == [GASP_WRITTEN] * 2, logs(tmp_path, nodes)
        text = logs(tmp_path, nodes)
        lost = f"The process that served the store at {nodes[0].address}:29500 has ended, and node machine0 is lost."
        assert lost in text
        assert not (tmp_path / "rank2").exists()
    run_alone(tmp_path)
    weights = [result.split()[:2] for result in results(tmp_path)]
    assert weights == [result.split()[:2] for result in alone], text
