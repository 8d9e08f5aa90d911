"""Incidents as lines in a file, scalars in a logger and one line for the user."""

import csv
import json
import re
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from tests.callbacks.training import PHASES, Hooked, train
from tests.support import world
from tests.support.job import Fault

# Key -> what its value must be; the order is part of it.
SCHEMA: dict[str, Any] = {
    "schema": int,
    "incident": int,
    "time": str,
    "outcome": str,
    "error": str,
    "detected": str,
    "ranks": list,
    "why": str,
    "faults": list,
    "level": str,
    "generation": int,
    "step": int,
    "epoch": int,
    "kind": str,
    "replaced": list,
    "forward": list,
    "moves": list,
    "phases_ms": dict,
    "recovery_s": float,
    "first_good_step_s": (float, type(None)),
    "inexact": dict,
    "redone": dict,
}


def lines(out: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (out / "recovery.jsonl").read_text().splitlines()]
    for line in found:
        assert list(line) == list(SCHEMA)
        assert all(isinstance(line[key], kind) for key, kind in SCHEMA.items()), line
        assert line["schema"] == 1
        assert datetime.fromisoformat(line["time"]).utcoffset() == timezone.utc.utcoffset(None)
        assert all(list(fault) == ["detected", "ranks", "text"] for fault in line["faults"])
        assert all(list(move) == ["source", "target", "bytes", "seconds", "host"] for move in line["moves"])
        assert list(line["redone"]) == ["batches", "seconds"]
        assert (line["first_good_step_s"] is None) == bool(line["error"]) == (line["outcome"] == "failed")
        if line["outcome"] == "recovered":
            assert list(line["phases_ms"]) == list(PHASES)
            assert 0 < sum(line["phases_ms"].values()) <= 1001 * line["recovery_s"]
            assert line["recovery_s"] < line["first_good_step_s"]
    return found


def rows(out: Path) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """What a CSVLogger has written: the training's own rows, and the scalars of incidents."""
    with (out / "csv" / "run" / "metrics.csv").open() as file:
        found = [{key: value for key, value in row.items() if value} for row in csv.DictReader(file)]
    return [row for row in found if "replica/incidents" not in row], [
        row for row in found if "replica/incidents" in row
    ]


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, world.Outcome]:
    out = tmp_path_factory.mktemp("untouched")
    return out, world.run(Hooked(), out, target=train)


def test_an_exception_and_then_a_death(untouched: tuple[Path, world.Outcome], tmp_path: Path) -> None:
    faults = (Fault("exception", 0, "backward", 1), Fault("kill", 3, "train_batch_end", 4))
    outcome = world.run(Hooked(faults=faults), tmp_path, target=train)
    outcome.assert_same(untouched[1])
    raised, died = lines(tmp_path)
    assert (raised["incident"], raised["detected"], raised["level"], raised["ranks"]) == (1, "exception", "retry", [0])
    assert raised["why"] == "rank 0: Injected: at backward of step 1"
    assert (raised["step"], raised["epoch"], raised["kind"], raised["generation"]) == (1, 0, "batch", 1)
    assert (raised["replaced"], raised["moves"]) == ([], [])
    assert raised["redone"]["batches"] == 1
    assert (died["incident"], died["detected"], died["level"], died["ranks"]) == (2, "death", "replacement", [3])
    assert died["why"] == "Rank 3 died (SIGKILL)"
    assert (died["step"], died["kind"], died["replaced"]) == (4, "tail", [3])
    (move,) = died["moves"]
    assert (move["source"], move["target"], move["host"]) == (1, 3, True)
    assert move["bytes"] > 4 * 3 * 300  # a shard of some 1000 parameters with their optimizer state, and the host's
    said = [line for line in outcome.logs.splitlines() if line.startswith("replica_zero: recovered")]
    assert len(said) == 2
    assert "rank 3 has its shard from rank 1" in said[1]
    assert "rank 3 was replaced" in said[1]
    own, scalars = rows(tmp_path)
    assert own == rows(untouched[0])[0]
    assert [row["replica/incidents"] for row in scalars] == ["1.0", "2.0"]
    assert [row["step"] for row in scalars] == ["2", "5"]
    assert float(scalars[1]["replica/moved_bytes"]) == move["bytes"]
    assert float(scalars[0]["replica/recovery_s"]) == pytest.approx(raised["recovery_s"], abs=1e-5)


def test_all_that_happens_between_two_good_steps_is_one_incident(
    untouched: tuple[Path, world.Outcome], tmp_path: Path
) -> None:
    faults = (
        Fault("kill", 1, "backward", 2),  # two at once
        Fault("exception", 2, "backward", 2),
        Fault("exception", 0, "reduction", 2),  # and again, once recovered
    )
    outcome = world.run(Hooked(faults=faults), tmp_path, target=train)
    outcome.assert_same(untouched[1])
    (line,) = lines(tmp_path)
    assert line["detected"] == "death"
    assert {"death", "exception"} <= {fault["detected"] for fault in line["faults"]}
    assert "rank 0: Injected: at reduction of step 2" in [fault["text"] for fault in line["faults"]]
    assert (line["step"], line["replaced"], line["generation"]) == (2, [1], len(line["faults"]))
    assert line["redone"]["batches"] >= 2
    assert len(re.findall(r"^replica_zero: recovered at step 2", outcome.logs, re.M)) == 1


def test_whoever_dies_before_it_has_written(untouched: tuple[Path, world.Outcome], tmp_path: Path) -> None:
    case = Hooked(faults=(Fault("exception", 1, "backward", 1),), dies_telling=0)
    outcome = world.run(case, tmp_path, target=train)
    outcome.assert_same(untouched[1])
    raised, died = lines(tmp_path)
    assert (raised["ranks"], raised["incident"], died["ranks"], died["incident"]) == ([1], 1, [0], 2)


def test_the_last_incident(tmp_path: Path) -> None:
    faults = (*(Fault("exception", 1, "forward", 2) for _ in range(4)),)
    outcome = world.run(Hooked(faults=faults, devices=2), tmp_path, target=train)
    assert outcome.code == 1
    (line,) = lines(tmp_path)
    assert (line["outcome"], line["step"], line["first_good_step_s"]) == ("failed", 2, None)
    assert line["error"].startswith("The same step has failed 4 times (max_tries=3): the one after step 2")
    assert line["why"] == "rank 1: Injected: at forward of step 2"
    assert len(re.findall(r"^replica_zero: recovery failed at step 2: The same step", outcome.logs, re.M)) == 1
    traceback = '[rank 1]     raise Injected(f"at {point} of step {step}")\n'
    assert outcome.logs.count(traceback) == outcome.logs.count("Traceback") == 1


def test_after_the_last_step(tmp_path: Path) -> None:
    case = Hooked(faults=(Fault("kill", 0, "train_end", 12),), devices=2)
    outcome = world.run(case, tmp_path, target=train)
    assert outcome.code == 0, outcome.logs
    (line,) = lines(tmp_path)
    assert (line["outcome"], line["step"], line["replaced"]) == ("recovered", 12, [0])
