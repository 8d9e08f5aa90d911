"""`lightning-replica doctor` on this machine, and on one where training cannot work."""

import argparse
import json
import re
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

from lightning_replica.cli import checks, doctor
from lightning_replica.cli.check import Check


def test_this_machine_is_well() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lightning_replica", "doctor", "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] is True
    by_name = {check["name"]: check for check in found["checks"]}
    assert set(by_name) >= {
        "python",
        "torch",
        "lightning",
        "lightning_replica",
        "system",
        "cpu",
        "gloo",
        "nccl",
        "hccl",
    }
    assert set(by_name) >= {"memory", "/dev/shm", "TCP on 127.0.0.1", "store", "2-rank training"}
    assert "a killed rank was replaced; the weights are identical" in by_name["2-rank training"]["found"]
    assert {check["status"] for check in found["checks"]} <= {"ok", "note"}


def test_a_training_that_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Both runs are told that they are ranks of a supervisor that is not there."""
    monkeypatch.setenv("LIGHTNING_REPLICA_STORE", "127.0.0.1:1")
    monkeypatch.setenv("LIGHTNING_REPLICA_SUPERVISOR", "1")
    monkeypatch.setenv("LIGHTNING_REPLICA_GENERATION", "0")
    assert doctor.run(argparse.Namespace(json=False)) == 1
    text = capsys.readouterr().out
    assert re.search(r"^FAILED 2-rank training +a training failed", text, re.M)
    assert re.search(r"^ok     store +works$", text, re.M)
    assert "Please report this" in text
    assert text.endswith("something failed: see above\n")


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [Requirement("torch"), Requirement("no-such-package>=2")]
    monkeypatch.setattr(checks, "_requirements", lambda: wanted)
    missing = list(checks.versions())[-1]
    assert missing == Check("no-such-package", "failed", "not installed", 'pip install "no-such-package>=2"')
