"""Faults from outside: which process is hit when, with processes of our own; and one real job, hit twice."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_replica.chaos.experiment import VARIABLE
from lightning_replica.chaos.outside import ROLES, SIGNALS, Hit, Strike, Striker, chosen, draw, fits
from lightning_replica.chaos.processes import Job, Member
from lightning_replica.chaos.progress import Progress
from lightning_replica.cli.main import main

SCRIPT = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("chaos_script.py"))]
# A supervisor with two ranks and a standby; rank 1 has a worker. Each line that it writes is a process's number.
TREE = "sleep 600 & echo $!; sh -c 'sleep 600 & echo $!; echo $$; wait' & sleep 600 & echo $!; wait"


class Tree:
    """A job of processes that sleep.

    Attributes:
        process: The supervisor.
        rank, worker, other, standby: Numbers of processes; the worker is that of ``other``.
    """

    def __init__(self, experiment: Path) -> None:
        environment = {**os.environ, VARIABLE: str(experiment)}
        self.process = subprocess.Popen(["sh", "-c", TREE], env=environment, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        pids = [int(self.process.stdout.readline()) for _ in range(4)]
        parents = {pid: int(Path(f"/proc/{pid}/stat").read_text().split()[3]) for pid in pids}
        (self.worker,) = (pid for pid in pids if parents[pid] != self.process.pid)
        self.other = parents[self.worker]
        self.rank, self.standby = (pid for pid in pids if pid not in (self.worker, self.other))

    @property
    def members(self) -> list[Member]:
        return [
            Member(self.process.pid, "supervisor", None), Member(self.rank, "rank", 0), Member(self.other, "rank", 1),
            Member(self.worker, "worker", 1), Member(self.standby, "standby", None),
        ]  # fmt: skip

    @property
    def ranks(self) -> dict[int, int]:
        return {self.rank: 0, self.other: 1}


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    tree = Tree(tmp_path / "experiment.json")
    job = Job(tmp_path / "experiment.json")
    yield tree
    job.end(0.0)
    tree.process.wait()
    assert tree.process.stdout is not None
    tree.process.stdout.close()


def gone(pid: int) -> bool:
    """Whether a process has died: none is left, or one that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except FileNotFoundError:
        return True


def write(folder: Path, rank: int, *records: dict[str, Any]) -> None:
    with (folder / f"rank{rank}.jsonl").open("a") as file:
        file.writelines(json.dumps({"fit": 0, **record}) + "\n" for record in records)


def test_what_each_process_is(tree: Tree, tmp_path: Path) -> None:
    job, by_pid = Job(tmp_path / "experiment.json"), sorted(tree.members, key=lambda each: each.pid)
    assert sorted(job.members(tree.ranks), key=lambda each: each.pid) == by_pid
    assert Job(tmp_path / "another.json").members(tree.ranks) == []
    assert not Job(tmp_path / "another.json").send(Member(tree.rank, "rank", 0), signal.SIGKILL)
    assert not gone(tree.rank)
    assert job.send(Member(tree.other, "rank", 1), signal.SIGSTOP)
    os.kill(tree.process.pid, signal.SIGKILL)
    tree.process.wait()
    job.end(0.0)  # those whose parent has died are found too, and those that are stopped
    assert job.outlived == sorted([tree.rank, tree.other, tree.worker, tree.standby])
    assert all(map(gone, job.outlived))


def test_signals_come_when_they_are_due(tree: Tree, tmp_path: Path) -> None:
    """Each after its step on all ranks, and once they have come further than the fault before it let them."""
    strikes = [Strike("kill", 2, 0.0, (0.9, 0.0)), Strike("kill", 3, 0.0, (0.0, 0.9)), Strike("kill", 9, 0.0, (0, 0))]
    progress, job = Progress(tmp_path, 2), Job(tmp_path / "experiment.json")
    striker = Striker(job, progress, strikes, ("rank", "standby"), 10, 1.0, tmp_path / "hits")

    def struck_after(*steps: int) -> int:
        for rank, step in enumerate(steps):
            write(tmp_path, rank, {"step": step})
        striker.look()
        return len(striker.hits)

    striker.look()  # nobody has written anything yet
    for pid, rank in tree.ranks.items():
        write(tmp_path, rank, {"world": 2, "pid": pid, "time": 0.0})
    assert [struck_after(1, 2), struck_after(2, 2), struck_after(3, 3), struck_after(3, 4)] == [0, 1, 1, 1]
    assert struck_after(4, 4) == 2
    first, second = striker.hits
    assert str(first) == "outside:kill:-:standby:2"
    assert (str(second), second.pid) == ("outside:kill:1:rank:4", tree.other)
    assert [json.loads(line)["pid"] for line in (tmp_path / "hits").read_text().splitlines()] == [
        tree.standby, tree.other,
    ]  # fmt: skip
    write(tmp_path, 1, {"world": 2, "pid": tree.worker, "time": 0.0})  # a process that takes the other's place
    assert struck_after(6, 0) == 2
    assert struck_after(9, 9) == 2  # too close to the end
    assert (striker.strikes, striker.missed) == ([], [Strike("kill", 9, 0.0, (0, 0))])


def test_after_the_supervisor_everything_begins_again(tree: Tree, tmp_path: Path) -> None:
    progress, job = Progress(tmp_path, 2), Job(tmp_path / "experiment.json")
    strikes = [Strike("term", 1, 0.0, (0.0, 0.0)), Strike("segv", 1, 0.0, (0.0, 0.0))]
    striker = Striker(job, progress, strikes, ("rank", "supervisor"), 10, 1.0, tmp_path / "hits")
    for pid, rank in tree.ranks.items():
        write(tmp_path, rank, {"world": 2, "pid": pid, "time": 0.0}, {"step": 5})
    assert striker.starts == 1
    striker.look()
    assert (str(striker.hits[0]), striker.starts) == ("outside:term:-:supervisor:5", 2)
    assert tree.process.wait() == -signal.SIGTERM
    write(tmp_path, 0, {"step": 6})
    write(tmp_path, 1, {"step": 6})  # of ranks that had not ended yet
    striker.look()
    assert len(striker.hits) == 1
    for pid, rank in tree.ranks.items():
        write(tmp_path, rank, {"world": 2, "pid": pid, "time": 1.0})
    striker.look()
    assert len(striker.hits) == 1
    for rank in range(2):
        write(tmp_path, rank, {"step": 1})
    striker.look()
    assert str(striker.hits[1]) == "outside:segv:0:rank:1"


def test_draws() -> None:
    drawn = draw(1, 200, 50, SIGNALS, ROLES)
    assert drawn == draw(1, 200, 50, SIGNALS, ROLES) != draw(2, 200, 50, SIGNALS, ROLES)
    assert {each.kind for each in drawn} == set(SIGNALS)
    assert [each.step for each in drawn] == sorted(each.step for each in drawn)
    assert {1, 47} <= {each.step for each in drawn} <= set(range(1, 48))
    members = [Member(9, "rank", 1), Member(8, "rank", 0), Member(7, "worker", 0), Member(1, "supervisor", None)]
    found = [(strike, chosen(strike, members, ROLES)) for strike in drawn]
    assert all(member is not None and fits(strike.kind, member.role) for strike, member in found)
    assert {member for _, member in found} == set(members)
    assert {strike.kind for strike, member in found if member == members[3]} == set(SIGNALS) - {"stop"}
    assert chosen(drawn[0], [], ROLES) is None
    assert str(Hit("stop", "worker", 1, 7, 12, 0.5)) == "outside:stop:1:worker:12"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--outside", "0"], "outside=0 must be a whole number, 1 or more"),
        (["--outside", "1", "--signals", "wink"], "signals='wink' must be one of 'kill'"),
        (["--outside", "1", "--targets", "cat"], "targets='cat' must be one of 'rank'"),
        (["--outside", "1", "--signals", ","], "signals is empty"),
        (["--outside", "1", "--signals", "kill,stop", "--targets", "supervisor"], "signals='stop' can hit none of"),
    ],
)
def test_what_makes_no_sense(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", *options, "--", "true"]) == 2
    assert message in capsys.readouterr().err


def chaos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return main(["chaos", "--out", str(tmp_path / "out"), *options])


@pytest.mark.timeout(900)  # four starts of Python and torch, one after the other
def test_a_job_that_survives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank is stopped and replaced; then the supervisor is killed, and the job started again."""
    options = ["--outside", "2", "--signals", "kill,stop", "--targets", "rank,supervisor", "--seed", "24"]
    assert chaos(tmp_path, monkeypatch, *options, "--", *SCRIPT, "2", "slow") == 0
    text = capsys.readouterr().out
    assert re.search(r"^  1 +outside:stop:0:rank:\d+ +step \d+, [\d.]+ s +recovered +identical$", text, re.M)
    assert re.search(r"^  1 +outside:kill:-:supervisor:\d+ +step \d+, [\d.]+ s +started again +identical$", text, re.M)
    assert text.splitlines()[-2] == "2 faults in 1 run, all bit-identical"
    log = (tmp_path / "out" / "run-1" / "log.txt").read_text()
    assert "it cannot show its stack: stopped by a signal" in log
    (stacks,) = (tmp_path / "out" / "run-1" / "replica_stacks").iterdir()
    assert sorted(path.name for path in stacks.iterdir()) == ["rank0.txt", "rank1.txt"]
    assert list((tmp_path / "cwd").iterdir()) == []


@pytest.mark.combinations
@pytest.mark.timeout(900)
def test_workers_and_standbys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--outside", "3", "--runs", "2", "--signals", "kill,segv,bus", "--targets", "worker,standby"]
    assert chaos(tmp_path, monkeypatch, *options, "--", *SCRIPT, "2", "slow", "workers", "standby") == 0
    text = capsys.readouterr().out
    assert len(re.findall(r"^  \d +outside:\w+:.*identical$", text, re.M)) >= 4
