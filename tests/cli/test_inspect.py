"""What `inspect` says of checkpoints, whole and damaged, and `export` of a directory of them."""

import importlib.metadata
import json
import os
import re
import socket
from pathlib import Path

import pytest
import torch

from lightning_replica.checkpoint import store
from lightning_replica.checkpoint.attempts import attempts_at
from lightning_replica.cli.main import main
from tests.checkpoint.small import directory_of, save
from tests.support.typed import in_store, on_disk


def lines(text: str) -> dict[str, str]:
    return dict(re.split(r" {2,}", line, maxsplit=1) for line in text.splitlines() if re.search(r"\S {2,}\S", line))


def test_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(tmp_path / "step", 120, 1.0, written_for="gasp")
    assert main(["inspect", str(path), "--verify", "--tensors"]) == 0
    text = capsys.readouterr().out
    found = lines(text)
    assert (found["checkpoint"], found["step"], found["written for"]) == (str(path), "120", "gasp")
    assert re.fullmatch(rf"\d{{4}}-\S+ \S+ UTC by rank 0 on {re.escape(socket.gethostname())}", found["saved"])
    assert found["run"] == "0, fit 1 of its script"
    assert found["ranks"] == "1, replicas=1, partition='element'"
    assert f"torch {importlib.metadata.version('torch')}" in found["versions"]
    assert found["weights"] == "147 trained, 3 others"
    assert found["optimizers"] == "SGD"
    size = sum(file.stat().st_size for file in path.iterdir()) - (path / "manifest.json").stat().st_size
    assert found["size"] == f"{size / 1024:.4g} KiB in 5 files"
    assert re.search(r"^  optimizer\.0\.momentum_buffer\.first\.weight +140 +float32$", text, re.M)
    assert text.splitlines()[-1] == "whole, to the last byte"


def test_a_damaged_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(tmp_path / "step", 120, 1.0)
    content = bytearray((path / "__0_0.distcp").read_bytes())
    content[100] ^= 1
    (path / "__0_0.distcp").write_bytes(content)
    assert main(["inspect", str(path)]) == 0, "which nobody sees without reading it"
    assert main(["inspect", str(path), "--verify"]) == 1
    assert "cannot be used: the checksum of __0_0.distcp differs" in capsys.readouterr().out
    os.truncate(path / "manifest.json", 10)
    assert main(["inspect", str(path)]) == 1
    assert "its manifest.json cannot be read" in capsys.readouterr().out
    (path / "manifest.json").unlink()
    assert main(["inspect", str(path)]) == 1
    assert "it has no manifest.json" in capsys.readouterr().err


def test_a_directory_of_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = directory_of(tmp_path, 10, 20, 30)
    assert main(["inspect", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert re.findall(r"^  (step_\d+) +0 +(\d+) +periodic .* (whole|whole, tracked)$", text, re.M) == [
        ("step_00000030", "30", "whole, tracked"),
        ("step_00000020", "20", "whole"),
        ("step_00000010", "10", "whole"),
    ]
    assert f"\ncheckpoint   {directory.path_of(30)}\n" in text
    assert text.splitlines()[-1] == "whole"
    os.truncate(on_disk(directory.path_of(30)) / "plain.pt", 10)
    (on_disk(directory.path_of(20)) / "manifest.json").unlink()
    assert main(["inspect", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert re.search(r"^  step_00000020 +\? .* DAMAGED$", text, re.M)
    assert re.search(r"^  step_00000030 +0 +30 .* DAMAGED, tracked$", text, re.M)
    assert f"\ncheckpoint   {directory.path_of(10)}\n" in text
    problems = text.splitlines()[-3:]
    assert "step_00000020 cannot be used: it has no manifest.json" in problems[0]
    assert "step_00000030 cannot be used: plain.pt has 10 bytes" in problems[1]
    assert problems[2] == f"The tracker {tmp_path / 'latest'} names 'step_00000030', which cannot be used."
    assert main(["inspect", str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["problems"], found["tracked"]) == (problems, "step_00000030")
    assert [each["whole"] for each in found["checkpoints"]] == [False, False, True]
    assert found["checkpoints"][2]["parameters"] == 147


def test_nothing_to_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        assert main(["inspect", str(path)]) == 1
        printed = capsys.readouterr()
        assert re.match(rf"lightning-replica: There is no (sharded )?checkpoint at {path}", printed.err)
        assert printed.out == ""


def test_export_takes_the_newest_whole_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = directory_of(tmp_path / "run", 10, 20)
    os.truncate(on_disk(directory.path_of(20)) / "__0_0.distcp", 10)
    file = tmp_path / "one.ckpt"
    assert main(["export", str(directory.path), str(file)]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{directory.path_of(10)} is exported to {file}.\n"
    assert re.match(r"lightning-replica: .*step_00000020 cannot be used: __0_0.distcp has 10 bytes", printed.err)
    assert torch.load(file, weights_only=True)["state_dict"]["first.bias"].tolist() == [10.0] * 7


def test_a_url(bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = directory_of(bucket, 10, 20)
    (attempt,) = attempts_at(in_store(directory.path_of(20)))
    assert main(["inspect", bucket, "--verify"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^  step_00000020 +0 +20 +periodic .* whole, tracked$", text, re.M)
    assert f"\ncheckpoint   {bucket}/step_00000020\n" in text
    assert text.splitlines()[-1] == "whole, to the last byte"
    assert main(["inspect", f"{bucket}/step_00000020"]) == 0
    assert lines(capsys.readouterr().out)["checkpoint"] == str(attempt.url)
    store.write(attempt.url / "__0_0.distcp", b"half")
    assert main(["inspect", bucket]) == 1
    assert f"The checkpoint {attempt.url} cannot be used: __0_0.distcp has 4 bytes" in capsys.readouterr().out
    file = tmp_path / "one.ckpt"
    assert main(["export", bucket, str(file)]) == 0
    assert capsys.readouterr().out == f"{directory.path_of(10)} is exported to {file}.\n"
    assert torch.load(file, weights_only=True)["state_dict"]["first.bias"].tolist() == [10.0] * 7
    assert main(["inspect", f"{bucket}/nothing"]) == 1
    assert main(["inspect", "oss://bucket/run"]) == 2
    said = capsys.readouterr().err
    assert f"There is no sharded checkpoint at {bucket}/nothing." in said
    assert "oss://bucket/run needs a package that is not installed: Install ossfs" in said
