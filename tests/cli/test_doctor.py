"""`lightning-replica doctor` on this machine, and on one where training cannot work."""

import argparse
import importlib.metadata
import json
import re
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

from lightning_replica._compat import packages, versions
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


def versions_where(monkeypatch: pytest.MonkeyPatch, wanted: list[str], installed: dict[str, str]) -> list[Check]:
    """What is said of requirements where these versions are installed."""

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(checks, "_requirements", lambda: [*map(Requirement, wanted)])
    monkeypatch.setattr(importlib.metadata, "version", version)
    return list(checks.versions())[-len(wanted) :]


def test_versions_that_were_tested_and_newer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(versions.TESTED, "torch", ("2.9.0", "2.15.0"))
    wanted = ["torch>=2.9", "psutil>=5.9"]
    tested, other = versions_where(monkeypatch, wanted, {"torch": "2.15.0+cpu", "psutil": "7.0"})
    assert tested == Check("torch", "ok", "2.15.0+cpu (tested: 2.9.0 to 2.15.0)")
    assert other == Check("psutil", "ok", "7.0")
    newer, _ = versions_where(monkeypatch, wanted, {"torch": "2.15.1", "psutil": "7.0"})
    assert (newer.status, newer.found) == ("note", "2.15.1, newer than 2.15.0, the newest that was tested")
    assert "try torch 2.15.0" in newer.advice
    old, _ = versions_where(monkeypatch, wanted, {"torch": "2.7.1", "psutil": "7.0"})
    assert (old.status, old.found) == ("failed", "2.7.1")


def test_of_python_two_numbers_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(versions.TESTED, "python", ("3.10", "3.13"))
    assert not versions.is_newer_than_tested("python", "3.13.9")
    assert versions.is_newer_than_tested("python", "3.14.0rc1")


def test_the_other_package_of_lightning_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "_chosen", packages.PYTORCH_LIGHTNING)
    (found,) = versions_where(monkeypatch, ["lightning>=2.6,<2.7"], {"pytorch-lightning": "2.6.1"})
    assert (found.name, found.status) == ("pytorch-lightning", "ok")


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [Requirement("torch"), Requirement("no-such-package>=2")]
    monkeypatch.setattr(checks, "_requirements", lambda: wanted)
    missing = list(checks.versions())[-1]
    assert missing == Check("no-such-package", "failed", "not installed", 'pip install "no-such-package>=2"')
