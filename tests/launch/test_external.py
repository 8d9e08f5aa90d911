"""Ranks that other launchers start: torchrun for real; SLURM and starting by hand by what they set."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_replica.errors import ConfigurationError
from lightning_replica.launch import external
from lightning_replica.launch.external import ExternalEnvironment
from tests.launch.test_script import SCRIPT, finish, results
from tests.support import job, world
from tests.support.forked import ForkedProcess
from tests.support.job import Case, Fault
from tests.support.ranks import free_port


def slurm(rank: int, port: int) -> dict[str, str]:
    return {
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_ID": "12",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "here",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "LOCAL_RANK": str(rank),  # for the job; Lightning does not look at it here
        "MASTER_PORT": str(port),
    }


def by_hand(rank: int, port: int) -> dict[str, str]:
    return {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def start(
    environment: Callable[[int, int], dict[str, str]], out: Path, target: Callable[..., None], *args: Any
) -> list[ForkedProcess]:
    port = free_port()
    out.mkdir(exist_ok=True)
    inherited = {**os.environ, "OMP_NUM_THREADS": "1"}
    return [
        ForkedProcess({**inherited, **environment(rank, port)}, out / f"log{rank}", target, *args) for rank in range(2)
    ]


@pytest.mark.parametrize("environment", [slurm, by_hand])
def test_an_exception_leaves_no_trace(
    environment: Callable[[int, int], dict[str, str]], pair: world.Outcome, tmp_path: Path
) -> None:
    case = Case((Fault("exception", 1, "backward", 2),), devices=2)
    processes = start(environment, tmp_path, job.run, case, tmp_path)
    logs = "".join((tmp_path / f"log{rank}").read_text() for rank in range(2) if processes[rank].wait() is not None)
    assert [process.returncode for process in processes] == [0, 0], logs
    assert [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)] == pair.ranks
    assert "recovered at step 2" in logs


def test_survivors_say_what_is_lost_and_end_when_told(tmp_path: Path) -> None:
    case = Case((Fault("kill", 1, "backward", 2),), devices=2)
    survivor, killed = start(slurm, tmp_path, job.run, case, tmp_path)
    assert killed.wait() == -signal.SIGKILL
    log = tmp_path / "log0"
    while "ranks [1] have not come back" not in log.read_text():
        assert survivor._process.is_alive(), log.read_text()
    survivor.send_signal(signal.SIGTERM)
    assert survivor.wait() == 1
    assert "The launcher has ended this run: only it can replace ranks [1], which are gone" in log.read_text()


def test_the_death_of_rank_0_ends_a_run_whose_store_it_serves(tmp_path: Path) -> None:
    case = Case((Fault("kill", 0, "backward", 2),), devices=2)
    killed, survivor = start(slurm, tmp_path, job.run, case, tmp_path)
    assert killed.wait() == -signal.SIGKILL
    assert survivor.wait() == 70
    assert "the store is gone, and with it rank 0" in (tmp_path / "log1").read_text()


def refused(case: Case, out: Path) -> None:
    try:
        job.run(case, out)
    except ConfigurationError as error:
        (out / f"refused{os.environ['SLURM_PROCID']}").write_text(str(error))


def test_another_number_of_ranks(tmp_path: Path) -> None:
    for process in start(slurm, tmp_path, refused, Case(devices=4), tmp_path):
        process.wait()
    for rank in range(2):
        assert "You set `devices=4` in Lightning, but" in (tmp_path / f"refused{rank}").read_text()


def test_a_rank_that_is_there_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a launcher starts a single process again, or two jobs share a port."""
    for name, value in by_hand(0, free_port()).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    cluster = LightningEnvironment()
    first = ExternalEnvironment.enter(cluster, 0, num_nodes=1)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"
    with pytest.raises(ConfigurationError, match="Rank 0 cannot listen at 127.0.0.1:"):
        ExternalEnvironment.enter(cluster, 0, num_nodes=1)
    ExternalEnvironment.enter(cluster, 1, num_nodes=1).connect().set("key", "of the first attempt")
    with pytest.raises(ConfigurationError, match="Rank 1 exists twice"):
        ExternalEnvironment.enter(cluster, 1, num_nodes=1)
    assert first.connect().check(["key"])
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert not ExternalEnvironment.enter(cluster, 1, num_nodes=1).connect().check(["key"])
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    ExternalEnvironment.enter(cluster, 1, num_nodes=1)


def test_who_has_not_come_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """As where variables of another launcher are left over."""
    monkeypatch.setattr(external, "_MISSED_S", 0.1)
    caplog.set_level(logging.INFO)
    for name, value in {**by_hand(0, free_port()), "SLURM_JOB_ID": "missing"}.items():
        monkeypatch.setenv(name, value)
    cluster = LightningEnvironment()
    cluster.set_world_size(3)
    environment = ExternalEnvironment.enter(cluster, 0, num_nodes=1)
    where = f"{environment.address}:{environment.port}"
    while f"ranks 1, 2 have not come to {where} yet. If no launcher has started this process" not in caplog.text:
        time.sleep(0.01)
    monkeypatch.setattr(external, "connect", lambda *_: sleeps_until("rank 1 waits for rank 0 at 127.0.0.1:", caplog))
    with pytest.raises(TimeoutError):
        ExternalEnvironment.enter(cluster, 1, num_nodes=1)


def sleeps_until(said: str, caplog: pytest.LogCaptureFixture) -> None:
    while said not in caplog.text:
        time.sleep(0.01)
    raise TimeoutError


def test_several_nodes_need_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in by_hand(0, free_port()).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match="which no other node can reach. Set MASTER_ADDR"):
        ExternalEnvironment.enter(LightningEnvironment(), 0, num_nodes=2)


def torchrun(*arguments: str, **environment: str) -> "subprocess.Popen[str]":
    """Two ranks of the script, all of which are started again once."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    return subprocess.Popen(
        [*launcher, str(SCRIPT), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **environment},
        start_new_session=True,
    )


@pytest.mark.combinations  # test_launchers.py has the same with a last checkpoint
def test_torchrun(tmp_path: Path) -> None:
    """First a rank raises, which is recovered from; then it is killed, and torchrun starts all ranks again."""
    process = torchrun("raise and kill", "1")
    output = finish(process)
    assert process.returncode == 0, output
    assert "recovered at step 2" in output
    assert "The launcher has ended this run: only it can replace ranks [1], which are gone" in output
    assert len(set(results(output).values())) == 1
    assert len(results(output)) == 2
