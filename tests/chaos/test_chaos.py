"""`lightning-replica chaos` with real scripts, with what cannot be tried, and its comparison alone."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_replica import ConfigurationError
from lightning_replica.callbacks import InjectedFault
from lightning_replica.chaos.compare import differences, read
from lightning_replica.chaos.experiment import VARIABLE, Experiment, overridden
from lightning_replica.chaos.experiments import Result, Struck
from lightning_replica.cli.chaos import summary
from lightning_replica.cli.main import main
from lightning_replica.core.options import RecoveryOptions
from tests.support.forked_python import scripts_are_forked

FORKED = [sys.executable, str(Path(__file__).with_name("chaos_script.py"))]
SCRIPT = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("chaos_script.py"))]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_a_script_that_survives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    faults = "kill:1:forward:3,exception:0:train_batch_end:8,exception:1:validation:1"
    with scripts_are_forked():
        assert main(["chaos", "--list", faults, "--out", str(tmp_path / "out"), "--", *FORKED, "2"]) == 3
    text = capsys.readouterr().out
    assert "untouched: 2 ranks, 12 steps" in text
    assert re.search(r"^  1 +kill:1:forward:3 +step 3 +recovered +identical$", text, re.M)
    assert re.search(r"^  1 +exception:0:train_batch_end:8 +step 8 +recovered +identical$", text, re.M)
    assert re.search(r"^  1 +exception:1:validation:1 +not reached +- +-$", text, re.M)
    assert text.splitlines()[-2] == "2 faults in 1 run, all bit-identical (1 more was not reached)"
    log = (tmp_path / "out" / "run-1" / "log.txt").read_text()
    assert "Rank 1 died (SIGKILL); a new process takes its place" in log
    assert "recovered" not in (tmp_path / "out" / "untouched" / "log.txt").read_text()
    places = json.loads((tmp_path / "out" / "untouched" / "points1.json").read_text())
    assert places["epoch_end"] == places["batch_end"] == 12
    assert "validation" not in places


@pytest.mark.combinations
@pytest.mark.timeout(600)
def test_a_script_that_never_does_the_same_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SIGTERM ends a run early: what there is of it is compared."""
    options = ["--list", "sigterm:0:forward:3", "--out", str(tmp_path / "out")]
    assert main(["chaos", *options, "--", *SCRIPT, "1", "odd"]) == 1
    text = capsys.readouterr().out
    assert "rank 0: different weights, main parameters of the shard, optimizer state of the shard after step 1" in text
    assert "Two untouched runs differ as well: the script itself is not deterministic." in text
    assert re.search(r"^  1 +sigterm:0:forward:3 +step 3 +stopped +different$", text, re.M)
    assert "1 fault in 1 run, 1 run different" in text
    assert "skipped" not in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "There is nothing to run"),
        (["--"], "There is nothing to run"),
        (["--runs", "0", "--", "true"], "runs=0 must be a whole number, 1 or more"),
        (["--faults", "0", "--", "true"], "faults=0 must be"),
        (["--mtbf-steps", "-1", "--", "true"], "mtbf_steps=-1.0 must be a number above 0"),
        (["--list", "kill:1", "--", "true"], "'kill:1' is not a fault"),
        (["--list", ",", "--", "true"], "--list is empty"),
        (["--kinds", "kill,murder", "--", "true"], "kinds='murder' must be one of"),
        (["--points", "here", "--", "true"], "points='here' must be one of"),
        (["--out", "/dev", "--", "true"], "--out /dev is not empty"),
        (["--timeout-s", "0", "--", "true"], "timeout_s=0.0 must be a number of seconds"),
        (["--", "no-such-program"], "'no-such-program' cannot be run"),
        (["--", "false"], "The script fails without any fault: it ended with exit code 1."),
        (["--", "true"], "holds no fingerprints: no fit with `strategy='replica_zero'` has begun"),
        (["--timeout-s", "0.01", "--", "sleep", "60"], r"it took too long (--timeout-s)"),
    ],
)
def test_what_cannot_be_tried(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["chaos", *options]) == 2
    assert message in capsys.readouterr().err


def test_the_script_s_words_are_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sh", "-c", f'echo "experiment ${VARIABLE}"; exit 3']
    assert main(["chaos", "--out", str(tmp_path / "out"), "--", *command]) == 2
    assert f"| experiment {tmp_path / 'out' / 'untouched' / 'experiment.json'}" in capsys.readouterr().err


def test_what_an_experiment_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = RecoveryOptions(max_restarts=3)
    assert overridden(options) == options
    Experiment(str(tmp_path), options={"max_restarts": 9}).write(tmp_path / "file")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file"))
    assert overridden(options) == RecoveryOptions(max_restarts=9)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nothing"))
    with pytest.raises(ConfigurationError, match="is not an experiment of `lightning-replica chaos`"):
        overridden(options)


def test_the_last_line() -> None:
    fault = InjectedFault("kill", 1, "forward", 3)
    good = Result(Path(), 0, [Struck(fault, 3, True)] * 4)
    assert summary([good] * 5) == "20 faults in 5 runs, all bit-identical"
    bad = [Result(Path(), 0, differences=["x"]), Result(Path(), 1, failure="x", missed=[fault])]
    assert summary([good, *bad]) == "4 faults in 3 runs, 1 run different, 1 run failed (1 more was not reached)"


def write(folder: Path, change: Any = None) -> Path:
    """Fingerprints of 2 ranks, 4 batches, 2 steps; ``change`` gets the records of rank 1."""
    folder.mkdir(parents=True)
    for rank in range(2):
        records: list[dict[str, Any]] = [{"fit": 0, "world": 2}]
        for batch in range(4):
            records.append({"fit": 0, "batch": [0, batch], "data": f"d{rank}{batch}"})
            if batch % 2:
                records.append({"fit": 0, "step": batch // 2 + 1, "weights": f"w{batch}", "random": f"r{rank}{batch}"})
        records.append({"fit": 0, "end": 2, "weights": "w3", "random": f"r{rank}3", "metrics": "m"})
        if rank == 1 and change is not None:
            change(records)
        (folder / f"rank{rank}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def cut(records: list[dict[str, Any]]) -> None:
    del records[5:]


def cut_with_a_hole(records: list[dict[str, Any]]) -> None:
    cut(records)
    del records[1]


@pytest.mark.parametrize(
    ("change", "cut_short", "expected"),
    [
        (lambda r: None, False, []),
        (lambda r: r.insert(2, r[1]), False, []),  # done again, the same
        (lambda r: r.insert(2, {**r[1], "data": "x"}), False,
         ["batch 0 of epoch 0, when it was repeated, had different data"]),
        (lambda r: r[1].update(data="x"), False, ["batch 0 of epoch 0 had different data"]),
        (lambda r: r.pop(2), False, ["batch 1 of epoch 0 was skipped"]),
        (lambda r: r.insert(1, {"fit": 0, "batch": [1, 0], "data": "x"}), False,
         ["batch 0 of epoch 1 was not seen in the untouched run"]),
        (lambda r: r[3].update(weights="x"), False, ["different weights after step 1 (1 of 2 states differ)"]),
        (lambda r: r.pop(3), False, ["step 1 is missing, and 0 more"]),
        (lambda r: r[-1].update(random="x", metrics="y"), False, ["different random numbers, metrics at the end"]),
        (lambda r: r.pop(), False, ["the end was not reached"]),
        (cut, True, []),
        (cut, False, ["batch 3 of epoch 0 was skipped", "step 2 is missing, and 0 more", "the end was not reached"]),
        (cut_with_a_hole, True, ["batch 0 of epoch 0 was skipped"]),
    ],
)  # fmt: skip
def test_comparison(change: Any, cut_short: bool, expected: list[str], tmp_path: Path) -> None:
    untouched, hurt = read(write(tmp_path / "untouched")), read(write(tmp_path / "hurt", change))
    assert differences(untouched, hurt, cut_short) == [f"rank 1: {text}" for text in expected]
