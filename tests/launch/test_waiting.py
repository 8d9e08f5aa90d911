"""A script cannot tell whether a standby or a new interpreter runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from lightning_replica.launch.standby import Standbys

SCRIPT = """
from __future__ import annotations
import json, multiprocessing, os, pickle, signal, sys
import neighbour

class Own:
    value: int = 5

def work(own, out):
    with open(out, "w") as file:
        file.write(type(own).__module__)

def main():
    from lightning.pytorch.utilities.rank_zero import rank_zero_only
    process = multiprocessing.get_context("spawn").Process(target=work, args=(Own(), sys.argv[1] + ".spawned"))
    process.start()
    process.join()
    seen = {
        "argv": sys.argv[2:],
        "path": [each for each in sys.path if not os.path.basename(each).startswith("tmp")],  # torch makes one
        "cwd": os.getcwd(),
        "environment": dict(os.environ),
        "main": sorted(globals()),
        "file": __file__,
        "names": [__name__, str(__package__), str(__spec__ and __spec__.name), Own.__module__],
        "pickled": pickle.loads(pickle.dumps(Own())).value,
        "spawned": open(sys.argv[1] + ".spawned").read(),
        "signals": [str(signal.getsignal(signal.SIGINT)).split(" at ")[0], list(signal.pthread_sigmask(0, []))],
        "rank": rank_zero_only.rank,
        "stdin": sys.stdin.fileno(),
    }
    with open(sys.argv[1], "w") as file:
        json.dump(seen, file)
    sys.exit(3)

if __name__ == "__main__":
    main()
"""


def test_as_a_new_process(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "code", tmp_path / "elsewhere"
    (folder / "package").mkdir(parents=True)
    elsewhere.mkdir()
    for place in (folder, folder / "package"):
        (place / "script.py").write_text(SCRIPT)
    (folder / "neighbour.py").touch()
    environment = {
        **os.environ,
        "LIGHTNING_REPLICA_RANK": "1",
        "LOCAL_RANK": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    environment.pop("PYTHONSAFEPATH", None)
    commands = [
        ([sys.executable, str(folder / "script.py")], str(elsewhere)),
        ([sys.executable, "-m", "package.script"], str(folder)),
    ]
    started = [
        [
            (start(fresh, [*line, str(out), "an argument", "--x=1"], cwd, {**environment, "HERE": str(number)}), out)
            for fresh, out in ((True, tmp_path / f"{number}new"), (False, tmp_path / f"{number}standby"))
        ]
        for number, (line, cwd) in enumerate(commands)
    ]
    for pair in started:
        new, standby = [result(*each) for each in pair]
        assert standby == new
        assert new["spawned"] == "__mp_main__"


def start(fresh: bool, command: list[str], cwd: str, environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    if fresh:
        return subprocess.Popen(command, env=environment, cwd=cwd)
    standbys = Standbys(lambda _: (command, cwd), 1)
    standbys._modules, standbys._wanted, standbys._changed = ["json", "does_not_exist"], True, lambda _: None
    standbys.fill(restarts_left=1)
    taken = standbys.take(1, environment)
    assert taken is not None
    return taken


def result(process: "subprocess.Popen[bytes]", out: Path) -> Any:
    assert process.wait(200) == 3
    return json.loads(out.read_text())


def test_a_spare_that_has_got_ranks_keeps_no_more_standbys_than_other_nodes(tmp_path: Path) -> None:
    """Starting them would take the processors from ranks that have just gone on."""
    (tmp_path / "script.py").touch()
    command = [sys.executable, str(tmp_path / "script.py")]
    standbys = Standbys(lambda _: (command, None), 0, least=2)
    standbys._modules, standbys._wanted, standbys._changed = ["json"], True, lambda _: None
    standbys.fill(restarts_left=1)
    assert len(standbys._waiting) == 2
    environment = {**os.environ, "LIGHTNING_REPLICA_RANK": "1", "LOCAL_RANK": "1"}
    taken = [standbys.take(rank, environment) for rank in (0, 1)]
    standbys._wanted = True  # a rank calls, as it has joined
    standbys.fill(restarts_left=1)
    assert not standbys._waiting
    standbys.keep(1)
    standbys.fill(restarts_left=1)
    assert len(standbys._waiting) == 1
    standbys.end()
    for process in taken:
        assert process is not None
        assert process.wait(100) == 0


def test_one_that_still_imports_does_not_keep_the_supervisor_waiting(tmp_path: Path) -> None:
    """Even though its environment does not fit into a pipe."""
    fifo, out = tmp_path / "fifo", tmp_path / "out"
    os.mkfifo(fifo)
    (tmp_path / "slow.py").write_text(f"open({str(fifo)!r}).close()\n")
    (tmp_path / "script.py").write_text(f"import os; open({str(out)!r}, 'w').write(os.environ['LONG'])\n")
    command = [sys.executable, str(tmp_path / "script.py")]
    standbys = Standbys(lambda _: (command, None), 1)
    standbys._modules, standbys._wanted, standbys._changed = ["slow"], True, lambda _: None
    standbys.fill(restarts_left=1)
    long = "x" * 200_000
    taken = standbys.take(1, {**os.environ, "LIGHTNING_REPLICA_RANK": "1", "LOCAL_RANK": "1", "LONG": long})
    assert taken is not None
    fifo.write_text("")  # now the import ends
    assert taken.wait(100) == 0
    assert out.read_text() == long
