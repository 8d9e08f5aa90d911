"""Where ranks' output goes under `lightning-replica run`, as under torchrun."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_replica.cli import run
from lightning_replica.core.options import RecoveryOptions
from lightning_replica.errors import ConfigurationError
from lightning_replica.launch.node import Node
from lightning_replica.launch.node_context import NodeContext
from lightning_replica.launch.rank_logs import RankLogs, redirect
from tests.support.nodes import COMMAND, ENVIRONMENT

SCRIPT = """
import os, signal, sys
from pathlib import Path
print("begins as", os.environ["RANK"], flush=True)
print("warns", file=sys.stderr, flush=True)

import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_replica import ReplicaZeroStrategy

class Model(BoringModel):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.global_rank == 1 and not Path("died").exists():
            Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)

L.Trainer(
    strategy=ReplicaZeroStrategy(replicas=2), accelerator="cpu", devices=2, max_steps=4, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
).fit(Model())
print("has trained", end="")
"""


def without_gloo(text: str) -> str:
    """The same without what gloo of torch 2.9 writes to stdout when it connects."""
    return "".join(line for line in text.splitlines(keepends=True) if "[Gloo]" not in line)


def test_a_rank_and_its_replacement(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    flags = ["--standalone", "--nproc-per-node", "2", "--log-dir", "logs", "--rdzv-id", "mine", "-r", "3", "-t", "1:1"]
    done = subprocess.run(
        [*COMMAND, "run", *flags, "train.py"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    (logs,) = (tmp_path / "logs").iterdir()
    assert logs.name.startswith("mine_")
    assert f"the output of ranks is in {logs}." in done.stderr
    found = {str(path.relative_to(logs)): without_gloo(path.read_text()) for path in logs.rglob("*.log")}
    (again,) = (
        path.name for path in logs.iterdir() if path.name != "attempt_0"
    )  # 1 or 2, whoever sees the death first
    assert found.keys() == {
        *("attempt_0/0/stdout.log", "attempt_0/0/stderr.log", "attempt_0/1/stdout.log", "attempt_0/1/stderr.log"),
        *(f"{again}/1/stdout.log", f"{again}/1/stderr.log"),
    }
    assert found["attempt_0/0/stdout.log"] == "begins as 0\nhas trained"
    assert found["attempt_0/1/stdout.log"] == "begins as 1\n"
    assert found[f"{again}/1/stdout.log"] == "begins as 1\nhas trained"
    assert all(text.startswith("warns\n") for name, text in found.items() if "stderr" in name)
    assert without_gloo(done.stdout) == "[rank 1] begins as 1\n[rank 1] begins as 1\n[rank 1] has trained\n"
    assert "warns" not in done.stderr
    assert "Rank 1 on node" in done.stderr


def test_what_is_shown_is_whole(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A line may come in parts, a progress bar has carriage returns, and bytes may be no text."""
    logs = RankLogs(tmp_path, {}, {0: 2})
    variables = logs.open(7, 0, 3, "0")
    assert variables == {"LIGHTNING_REPLICA_STDERR": str(tmp_path / "attempt_3" / "0" / "stderr.log")}
    with open(variables["LIGHTNING_REPLICA_STDERR"], "ab", buffering=0) as file:
        for part in (b"half ", b"a line\n", b" 1%\r 2%\r\xff\n", b"the end"):
            file.write(part)
    logs.close()
    assert capfd.readouterr().err == "[rank 7] half a line\n[rank 7]  1%\r 2%\r\ufffd\n[rank 7] the end\n"


def test_a_standby_writes_there_too(tmp_path: Path) -> None:
    """It has begun before it was known whose place it takes."""
    file = tmp_path / "stdout.log"
    file.write_text("of before\n")
    script = "import os; os.environ['LIGHTNING_REPLICA_STDOUT'] = {!r}; {}; redirect(); print('as a rank')"
    code = script.format(str(file), f"from {redirect.__module__} import redirect")
    done = subprocess.run([sys.executable, "-c", code], env=dict(os.environ), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert file.read_text() == "of before\nas a rank\n"


@pytest.mark.parametrize(
    ("flags", "redirects", "tee"),
    [
        ([], None, None),
        (["--log-dir", "{}"], None, None),
        (["--log-dir", "{}", "--redirects", "3"], {0: 3, 1: 3}, {0: 0, 1: 0}),
        (["--log-dir", "{}", "-r", "1:2", "--tee", "0:1,1:3"], {1: 2}, {0: 1, 1: 3}),
    ],
)
def test_flags(flags: list[str], redirects: dict[int, int] | None, tee: dict[int, int] | None, tmp_path: Path) -> None:
    given = run.parse([*(each.format(tmp_path) for each in flags), "train.py"])
    logs = run.logs_of(given, 2)
    assert (logs and logs.redirects, logs and logs.tee) == (redirects, tee)


def test_flags_that_say_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--tee=7: give 0, 1 .stdout., 2 .stderr. or 3 .both., or one of them"):
        run.logs_of(run.parse(["--tee", "7", "train.py"]), 2)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="--log-dir=.*: .*Not a directory.* Choose another directory."):
        run.logs_of(run.parse(["--log-dir", str(tmp_path / "file"), "-r", "3", "train.py"]), 2)


def test_a_replacement_takes_its_place_without_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk for logs must end no training; at its start it is an error."""
    asked: list[int] = []

    def fail(self: RankLogs, rank: int, local_rank: int, generation: int, folder: str) -> dict[str, str]:
        asked.append(generation)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RankLogs, "open", fail)
    logs = RankLogs(tmp_path, {0: 3}, {})
    started: list[dict[str, str]] = []

    def start(rank: int, environment: dict[str, str]) -> Any:
        started.append(environment)
        return subprocess.Popen([sys.executable, "-c", ""])

    node = Node(start, 1, RecoveryOptions(), tmp_path, None, logs)
    node.open(NodeContext.alone(1, 1), NotImplemented)
    with pytest.raises(OSError, match="No space left"):
        node.start(0, 0)
    node.start(0, 1)
    node.close()
    assert asked == [0, 1]
    assert len(started) == 1
    assert not [name for name in started[0] if name.endswith(("STDOUT", "STDERR"))]
    assert "the output of rank 0 goes to no file: [Errno 28] No space left on device." in caplog.text
