"""`lightning-replica verify` with real scripts: one whose recovery is exact, and others."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lightning_replica.chaos.experiments import Laboratory, Result, Struck
from lightning_replica.chaos.faults import InjectedFault
from lightning_replica.cli.main import main
from lightning_replica.cli.verify import code_of, trials
from tests.support.forked_python import scripts_are_forked

ZOO = str(Path(__file__).with_name("zoo.py"))
FORKED = [sys.executable, str(Path(__file__).with_name("chaos_script.py"))]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.combinations
def test_a_script_that_is_proven(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with scripts_are_forked():
        assert main(["verify", "--steps", "3", "--out", str(tmp_path / "out"), "--", *FORKED, "2", "clock"]) == 0
    text = capsys.readouterr().out
    for name, faults in (("each batch done again", 3), ("each end of a batch done again", 3), ("rank 0 replaced", 1)):
        assert re.search(rf"^  {name} +{faults} +identical$", text, re.M), text
    for name in ("rank 1 replaced", "stopped and resumed"):
        assert re.search(rf"^  {name} +1 +identical$", text, re.M), text
    assert "Not compared, because two untouched runs differ in it as well:\n    module.began\n" in text
    assert "not exact" not in text
    assert text.splitlines()[-1] == "3 steps on 2 ranks, proven: every run has the bits of the untouched one"


@pytest.mark.combinations
def test_a_script_with_state_of_every_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with scripts_are_forked():
        assert main(["verify", "--out", str(tmp_path / "out"), "--", sys.executable, ZOO]) == 0, capsys.readouterr().out
    text = capsys.readouterr().out
    assert "not exact" not in text
    assert "Not compared" not in text
    assert text.splitlines()[-1] == "6 steps on 2 ranks, proven: every run has the bits of the untouched one"


@pytest.mark.combinations
def test_a_script_that_depends_on_a_global(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with scripts_are_forked():
        assert main(["verify", "--steps", "3", "--out", str(tmp_path / "out"), "--", *FORKED, "2", "hidden"]) == 1
    text = capsys.readouterr().out
    assert re.search(r"^  each batch done again +3 +different$", text, re.M), text
    assert re.search(r"^  rank 1 replaced +1 +different$", text, re.M), text
    assert re.search(r"^  stopped and resumed +1 +different$", text, re.M), text
    assert "each batch done again: rank 0: different module.seen after step 1" in text
    assert re.search(
        r"The training itself has said what is not exact:\n    the loss of step 1 on rank \d: it was", text
    )
    assert "the difference comes from recovery. State in an attribute of the module" in text
    assert text.splitlines()[-1] == "3 steps on 2 ranks, NOT proven"


def test_a_script_that_never_does_the_same_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with scripts_are_forked():
        assert main(["verify", "--steps", "3", "--out", str(tmp_path / "out"), "--", *FORKED, "2", "odd"]) == 2
    assert "Two untouched runs differ, so the script itself is not deterministic" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "There is nothing to run: write `lightning-replica verify -- python train.py`"),
        (["--steps", "1", "--", "true"], "steps=1 must be a whole number, 3 or more"),
        (["--", "false"], "The script fails without any fault"),
        (["--", "true"], "holds no fingerprints"),
    ],
)
def test_what_cannot_be_verified(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *options]) == 2
    assert message in capsys.readouterr().err


def test_one_rank_cannot_be_replaced() -> None:
    laboratory = cast("Laboratory", SimpleNamespace(steps=4, ranks=1))
    found = {trial.name: trial for trial in trials(laboratory)}
    assert found["rank 0 replaced"].run is None
    assert found["rank 1 replaced"].why == "the script trains on one rank, which has no peer"
    assert found["each batch done again"].run is not None


FAULT = InjectedFault("exception", 0, "forward", 1)
RESULTS: dict[str, Any] = {
    "same": Result(Path(), 0, [Struck(FAULT, 1, True)]),
    "different": Result(Path(), 0, [Struck(FAULT, 1, True)], differences=["x"]),
    "failed": Result(Path(), 1, failure="x"),
    "missed": Result(Path(), 0, missed=[FAULT]),
    "not tried": None,
}


@pytest.mark.parametrize(
    ("names", "code"),
    [
        (("same", "same"), 0),
        (("same", "missed"), 3),
        (("same", "not tried"), 3),
        (("missed", "different", "not tried"), 1),
        (("different", "failed"), 2),
    ],
)
def test_exit_codes(names: tuple[str, ...], code: int) -> None:
    assert code_of([RESULTS[name] for name in names]) == code
