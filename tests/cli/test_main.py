"""The command line as a user meets it: help, output, exit codes."""

import argparse
import json
import re
import warnings
from pathlib import Path
from typing import Any, get_args

import pytest
from lightning.fabric.connector import (
    _PRECISION_INPUT_INT,
    _PRECISION_INPUT_STR_ALIAS,
    _convert_precision_to_unified_args,
)

import lightning_replica
from lightning_replica.cli.main import main, parser

SEVEN_B = ["plan", "--ranks", "64", "--replicas", "2", "--params", "7e9", "--precision", "bf16-mixed"]


def commands() -> dict[str, argparse.ArgumentParser]:
    action = next(a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


def test_help_names_every_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = capsys.readouterr().out
    assert "Checks machines and jobs before `Trainer(strategy='replica_zero')` runs" in text
    assert re.search(r"^ +doctor +does `replica_zero` work on this machine\?$", text, re.M)
    assert re.search(r"^ +plan +memory and traffic per rank, and which losses a job survives$", text, re.M)
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("name", ["chaos", "verify", "doctor", "inspect", "plan", "timeline"])
def test_help_explains_every_option(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    command = commands()[name]
    assert set(commands()) == {
        "chaos", "doctor", "export", "import", "inspect", "plan", "run", "save", "store", "timeline", "verify"
    }  # fmt: skip
    assert all(action.help and action.help != argparse.SUPPRESS for action in command._actions)
    text = command.format_help()
    assert ("--json" in text) == (name in ("doctor", "inspect", "plan"))
    assert max(map(len, text.splitlines())) <= 120


def test_help_of_doctor_tells_the_exit_codes() -> None:
    assert "Exit code: 0 if everything works, 1 if something failed." in commands()["doctor"].format_help()


def test_the_example_in_the_help_works(capsys: pytest.CaptureFixture[str]) -> None:
    example = next(line for line in commands()["plan"].format_help().splitlines() if "--params 7B" in line)
    assert main(example.split()[1:]) == 0
    assert "Any one node of 8 may be lost at a time." in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"lightning-replica {lightning_replica.__version__}\n"


def test_plan_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SEVEN_B, "--ranks-per-node", "8"]) == 0
    text = capsys.readouterr().out
    rows = {cells[0]: cells[1:] for line in text.splitlines() if len(cells := re.split(r" {2,}", line.strip())) > 1}
    assert rows["optimizer state"] == ["52.15 GiB", "834.5 MiB", "1.63 GiB"]
    assert rows["parameters of the shard"] == ["-", "417.2 MiB", "834.5 MiB"]
    assert rows["their gradient"] == ["-", "-", "-"]
    assert rows["sent by a rank"] == ["51.34 GiB"] * 3
    assert rows["out of a node"] == ["51.34 GiB", "45.63 GiB", "45.63 GiB"]
    assert rows["2 ranks"] == ["32", "2,016", "1.587%"]
    assert rows["2 nodes"] == ["4", "28", "14.286%"]
    assert "Any one rank of 64 may be lost at a time." in text


def test_plan_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SEVEN_B, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["job"]["shards"] == 32
    assert found["memory_bytes"]["replica_zero"]["optimizer"] == 7e9 * 8 / 32
    assert found["sent_bytes_per_step"]["replica_zero"] == 7e9 * 4 * 2 * 63 / 64
    assert found["rank_losses"]["fatal"][0] == {
        "losses": 2, "sets": 2016, "fatal": 32, "probability": pytest.approx(1 / 63),
    }  # fmt: skip
    assert "node_losses" not in found


def test_plan_without_redundancy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--ranks", "1", "--replicas", "1", "--params", "10"]) == 0
    assert "Nothing is protected: the loss of a single rank" in capsys.readouterr().out


def test_plan_tells_of_nodes_that_share_too_much(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--ranks", "24", "--params", "1e6", "--ranks-per-node", "8"]) == 0
    text = capsys.readouterr().out
    assert "A replica does not fill a whole number of nodes" in text
    assert "3 nodes" not in text


def test_plan_by_the_number_of_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for options in (["--nodes", "8"], ["--ranks-per-node", "8"], ["--nodes", "8", "--replicas", "16"]):
        assert main([*SEVEN_B, *options]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert "holders on one node" not in texts[0]
    assert "4 of 4 shards have several of their 16 holders on one node" in texts[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--replicas", "3"], "lightning-replica: replicas=3 does not divide ranks=64"),
        (["--precision", "fp8"], "precision='fp8' is not known. Choose one of 32-true"),
        (["--ranks-per-node", "7"], "ranks_per_node=7 does not divide ranks=64"),
        (["--nodes", "7"], "nodes=7 cannot share ranks=64 evenly: give a divisor of it."),
        (["--nodes", "0"], "nodes=0 must be a whole number, 1 or more."),
        (["--ranks", "0"], "ranks=0 must be 1 or more"),
    ],
)
def test_bad_input_is_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SEVEN_B, *options]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert len(printed.err.splitlines()) == 1
    assert printed.out == ""


@pytest.mark.parametrize(
    ("params", "elements"),
    [
        ("7000000000", 7_000_000_000),
        ("7_000_000_000", 7_000_000_000),
        ("1.3e9", 1_300_000_000),
        ("1.3B", 1_300_000_000),
        ("350M", 350_000_000),
        ("350 m", 350_000_000),
        ("0.5k", 500),
        ("1T", 10**12),
    ],
)
def test_numbers_of_elements(params: str, elements: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--ranks", "2", "--params", params, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["job"]["parameters"] == elements


@pytest.mark.parametrize("params", ["many", "1.5", "inf", "nan", "7Q", "B", "0.0001K", "1e400", "1e999999999", "_"])
def test_what_is_no_number(params: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--ranks", "2", "--params", params])
    assert f"argument --params: '{params}' is not a whole number of elements" in capsys.readouterr().err


@pytest.mark.parametrize("alias", [*get_args(_PRECISION_INPUT_STR_ALIAS), *map(str, get_args(_PRECISION_INPUT_INT))])
def test_precisions_by_lightning_s_other_names(alias: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's own advice to use the long name
        meant = _convert_precision_to_unified_args(alias)
    assert main([*SEVEN_B, "--precision", alias, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["job"]["precision"] == meant


def test_export_of_what_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path / "nothing"), str(tmp_path / "file.ckpt")]) == 1
    assert str(tmp_path / "nothing") in capsys.readouterr().err
