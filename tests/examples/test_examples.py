"""Every example as a user runs it, small: all of them train the same model and end with the same bits."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support import forked_python
from tests.support.hydra_scripts import needs_hydra

EXAMPLES = Path(__file__).parents[2] / "examples"
SUPPORT = Path(__file__).parents[1] / "support"
TINY_HYDRA = ["trainer.devices=2", "trainer.max_steps=4", "model.width=40", "model.depth=1"]
TINY_CLI = ["fit", "--config", str(EXAMPLES / "train_cli.yaml"), *(f"--{option}" for option in TINY_HYDRA)]


def run(folder: Path, script: str, *options: str, fork: bool = True) -> "subprocess.CompletedProcess[str]":
    """Runs an example, in a fork of a process that has imported torch, or as a user does."""
    line = [sys.executable, str(EXAMPLES / script), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": search_path()}
    if not fork:
        pipe, together = subprocess.PIPE, subprocess.STDOUT
        return subprocess.run(line, cwd=folder, env=environment, text=True, timeout=200, stdout=pipe, stderr=together)
    with tempfile.TemporaryDirectory() as outside:
        return forked_python.run(line, folder, environment, Path(outside) / "output", 200)


def search_path() -> str:
    """Where examples find `kill` too."""
    return os.pathsep.join(filter(None, [str(SUPPORT), os.environ.get("PYTHONPATH", "")]))


def assert_came_back(done: "subprocess.CompletedProcess[str]", rank: int, standby: int) -> None:
    """Once, and as a standby if there was one."""
    who = "a standby" if standby else "a new process"
    assert f"Rank {rank} died (SIGKILL); {who} takes its place (1 of 3)" in done.stdout
    assert len(re.findall(rf"recovered at step 2 in [\d.]+ s: rank {rank} was replaced", done.stdout)) == 1
    assert re.findall(r"^rank (\d) was a standby", done.stdout, re.M) == [str(rank)] * standby


def fingerprint(done: "subprocess.CompletedProcess[str]") -> str:
    assert done.returncode == 0, done.stdout
    (found,) = re.findall(r"^fingerprint (\w{64})$", done.stdout, re.M)
    return str(found)


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("plain")
    done = run(folder, "train.py", "--devices", "2", "--steps", "4", "--width", "40", "--depth", "1")
    assert "replica_zero:" not in done.stdout
    assert not list(folder.iterdir())
    return fingerprint(done)


def output_folder(folder: Path) -> Path:
    (found,) = folder.glob("outputs/*/*")
    return found


@needs_hydra
def test_hydra(untouched: str, tmp_path: Path) -> None:
    assert fingerprint(run(tmp_path, "train_hydra.py", *TINY_HYDRA, "strategy.max_tries=5")) == untouched
    assert "max_tries: 5" in (output_folder(tmp_path) / ".hydra" / "config.yaml").read_text()


@needs_hydra
@pytest.mark.parametrize(("rank", "standby"), [(0, 1), pytest.param(1, 0, marks=pytest.mark.combinations)])
def test_hydra_with_a_lost_rank(rank: int, standby: int, untouched: str, tmp_path: Path) -> None:
    options = ["+experiment=lost_rank", "callbacks.kill.step=2", f"callbacks.kill.rank={rank}"]
    if standby:
        options += ["callbacks.kill._target_=kill.Kill", "+callbacks.kill.standby=1", "strategy.standby=1"]
    done = run(tmp_path, "train_hydra.py", *TINY_HYDRA, *options, fork=not standby)
    assert fingerprint(done) == untouched
    assert_came_back(done, rank, standby)
    # One folder for the supervisor, both ranks and the replacement; the configuration is the supervisor's.
    found = {str(path.relative_to(output_folder(tmp_path))) for path in output_folder(tmp_path).rglob("*.*")}
    logs = {"train_hydra.log", "train_ddp_process_0.log", "train_ddp_process_1.log"}
    assert found == logs | {".hydra", ".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml"}
    assert [path.name for path in tmp_path.iterdir()] == ["outputs"]


@needs_hydra
def test_hydra_with_a_misspelt_option(tmp_path: Path) -> None:
    done = run(tmp_path, "train_hydra.py", *TINY_HYDRA, "strategy.replcas=2")
    assert done.returncode == 1
    assert "Key 'replcas' not in 'StrategyConf'" in done.stdout


@needs_hydra
def test_hydra_multirun(tmp_path: Path) -> None:
    done = run(tmp_path, "train_hydra.py", "--multirun", *TINY_HYDRA[1:], "trainer.devices=2,4")
    assert done.returncode == 1
    assert "Start one process for each job" in done.stdout
    assert "fingerprint" not in done.stdout


@pytest.mark.combinations  # the wild script "cli" is killed in every run
@pytest.mark.parametrize(("rank", "standby"), [(0, 0), (1, 1)])
def test_cli_with_a_lost_rank(rank: int, standby: int, untouched: str, tmp_path: Path) -> None:
    kill = ["--trainer.callbacks+=gpt.Kill", f"--trainer.callbacks.rank={rank}", "--trainer.callbacks.step=2"]
    if standby:
        kill[0] = "--trainer.callbacks+=kill.Kill"
        kill += ["--trainer.callbacks.standby=1", "--trainer.strategy.init_args.standby=1"]
    done = run(tmp_path, "train_cli.py", *TINY_CLI, *kill, fork=not standby)
    assert fingerprint(done) == untouched
    assert_came_back(done, rank, standby)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")] == ["lightning_logs/config.yaml"]


def test_cli_by_class_path_and_its_arguments(untouched: str, tmp_path: Path) -> None:
    strategy = ["class_path=lightning_replica.ReplicaZeroStrategy", "init_args.replicas=1"]
    assert (
        fingerprint(run(tmp_path, "train_cli.py", *TINY_CLI, *(f"--trainer.strategy.{s}" for s in strategy)))
        == untouched
    )


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("replcas=2", "'replcas'"),  # each version of jsonargparse says it in other words
        ("replicas=two", "Expected a <class 'int'>"),
    ],
)
def test_cli_with_a_mistake(option: str, message: str, tmp_path: Path) -> None:
    done = run(tmp_path, "train_cli.py", *TINY_CLI, f"--trainer.strategy.init_args.{option}")
    assert done.returncode == 2
    assert message in done.stdout


def test_examples_stay_small() -> None:
    sizes = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("train*")}
    assert set(sizes) == {"train.py", "train_hydra.py", "train_cli.py", "train_cli.yaml"}
    assert max(sizes.values()) < 100
