"""Loggers as a user's script has them, used before there is a Trainer, and before `fit`: DDP's runs, files and rows."""

import csv
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import forked_python

SCRIPT = Path(__file__).parents[1] / "support" / "logging_script.py"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """DDP's folder, and that of a run in which rank 0 and then rank 1 were killed."""
    commands = {"ddp": ["ddp"], "killed": ["replica_zero", "0:3", "1:7"]}
    folders = {name: tmp_path_factory.mktemp(name) for name in commands}
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "WANDB_SILENT": "true",
        "WANDB_MODE": "offline",
    }
    for name, arguments in commands.items():
        line = [sys.executable, str(SCRIPT), *arguments]
        output = tmp_path_factory.mktemp("output") / name
        done = forked_python.run(line, folders[name], environment, output, 200)
        assert done.returncode == 0, done.stdout
    assert sorted(path.name for path in folders["killed"].glob("killed*")) == ["killed0", "killed1"]
    return folders


def test_csv(runs: dict[str, Path]) -> None:
    def seen(folder: Path) -> dict[str, Any]:
        rows = {str(path.relative_to(folder)): path.read_text() for path in folder.glob("*/version_*/hparams.yaml")}
        for path in folder.glob("*/version_*/metrics.csv"):
            with path.open() as file:
                rows[str(path.relative_to(folder))] = list(csv.DictReader(file))  # type: ignore[assignment]
        return rows

    killed = seen(runs["killed"])
    assert killed == seen(runs["ddp"])
    assert {"early/version_0/metrics.csv", "late/version_0/metrics.csv"} <= set(killed)


def test_rates_that_a_callback_has_seen(runs: dict[str, Path]) -> None:
    seen = {name: [(folder / f"rates{rank}.json").read_text() for rank in range(2)] for name, folder in runs.items()}
    assert seen["killed"] == seen["ddp"]
    assert all(len(rates) == 12 for each in seen["ddp"] for rates in json.loads(each).values())


def test_tensorboard(runs: dict[str, Path]) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def seen(folder: Path) -> dict[str, list[tuple[int, float]]]:
        (version,) = (folder / "tensorboard").iterdir()
        events = accumulator.EventAccumulator(str(version)).Reload()
        tags = set(events.Tags()["scalars"]) - {"hp_metric"}  # Lightning's, for each time that a script logs parameters
        return {tag: [(row.step, row.value) for row in events.Scalars(tag)] for tag in tags}

    killed = seen(runs["killed"])
    assert killed == seen(runs["ddp"])
    assert len(killed["loss"]) == 12


def test_mlflow(runs: dict[str, Path]) -> None:
    pytest.importorskip("mlflow")

    def seen(folder: Path) -> dict[str, Any]:
        (run,) = (path.parent for path in (folder / "mlflow").glob("*/*/meta.yaml"))
        status = [line for line in (run / "meta.yaml").read_text().splitlines() if line.startswith("status")]
        params = {path.name: path.read_text() for path in (run / "params").iterdir()}
        rows = {path.name: [line.split()[1:] for line in path.read_text().splitlines()] for path in _files(run)}
        return {"status": status, "params": params, "rows": rows}

    killed = seen(runs["killed"])
    assert killed == seen(runs["ddp"])
    assert len(killed["rows"]["loss"]) == 12


def _files(run: Path) -> list[Path]:
    return [path for path in (run / "metrics").rglob("*") if path.is_file()]


def test_wandb(runs: dict[str, Path]) -> None:
    pytest.importorskip("wandb")
    for folder in runs.values():
        ids = {path.name.rpartition("-")[2] for path in (folder / "wandb").glob("offline-run-*")}
        assert len(ids) == 1, ids
