"""What `inspect` says of checkpoints that are one file: those of Lightning's own, and others."""

import argparse
import json
import random
import zipfile
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_replica.chaos.fingerprint import digest
from lightning_replica.cli.main import main
from lightning_replica.trainer.saving.checkpoints import OWN_KEY
from tests.cli.test_inspect import lines


class Model(BoringModel):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What Lightning writes without us."""
    folder = tmp_path_factory.mktemp("written")
    trainer = L.Trainer(
        accelerator="cpu", max_steps=3, logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(Model())
    trainer.save_checkpoint(folder / "one.ckpt", weights_only=False)
    return folder / "one.ckpt"


def inspect(path: object, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    code = main(["inspect", str(path), *options])
    return code, capsys.readouterr().out


def test_one_of_lightning_s(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = inspect(written, capsys, "--tensors")
    found = lines(text)
    assert code == 0
    assert found["form"] == f"one file, as Lightning {L.__version__} writes it for every strategy"
    assert found["step"].startswith("3, in epoch ")
    assert found["weights"] == "66 elements in 2 tensors, float32"
    assert found["optimizers"] == f"{2 * 66 + 2} elements of state"  # Adam counts steps of each parameter
    assert found["callbacks"] == "ModelCheckpoint"
    assert found["resume"] == "at the next batch that repeats no sample, with random numbers of its own"
    assert "\n  layer.weight        64  float32\n" in text
    assert text.splitlines()[-1] == "it can be read; --verify checks its checksums"
    code, text = inspect(written, capsys, "--verify")
    assert (code, text.splitlines()[-1]) == (0, "whole, to the last byte")


def test_one_of_ours_and_one_without_optimizers(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = torch.load(written, weights_only=True)
    torch.save({**checkpoint, OWN_KEY: {"main": {}, "resume": {"world_size": 4}}}, tmp_path / "ours")
    code, text = inspect(tmp_path / "ours", capsys)
    assert code == 0
    assert lines(text)["resume"] == "with 4 ranks at the exact batch, to the last bit (written by replica_zero)"
    del checkpoint["optimizer_states"]
    torch.save(checkpoint, tmp_path / "weights")
    found = lines(inspect(tmp_path / "weights", capsys)[1])
    assert found["optimizers"] == "none: it holds weights only"
    assert found["resume"] == "no: it has no optimizer state"


def test_every_flipped_bit_that_changes_anything_is_found(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch looks at no checksum when it loads, `inspect --verify` at every one."""
    content, dice = written.read_bytes(), random.Random(0)
    whole, path, silent = digest(torch.load(written, weights_only=True)), tmp_path / "flipped", 0
    for _ in range(60):
        bit, flipped = dice.randrange(8 * len(content)), bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        code, _ = inspect(path, capsys, "--verify")
        try:
            same = digest(torch.load(path, weights_only=True)) == whole
        except Exception:
            same = False
        else:
            silent += not same
        assert same or code == 1, f"bit {bit}"
    assert silent > 0, "none of these would have shown by itself"


def test_the_record_with_the_wrong_checksum_is_named(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with zipfile.ZipFile(written) as archive:
        record = archive.getinfo(next(name for name in archive.namelist() if name.endswith("/data/0")))
    content, path = bytearray(written.read_bytes()), tmp_path / "flipped.ckpt"
    content[record.header_offset + 200] ^= 1
    path.write_bytes(content)
    assert inspect(path, capsys)[0] == 0, "which nobody sees without reading it"
    code, text = inspect(path, capsys, "--verify", "--json")
    found = json.loads(text)
    assert (code, found["checkpoints"][0]["whole"]) == (1, False)
    assert found["problems"] == [
        f"The checkpoint {path} cannot be used: the checksum of its record {record.filename} differs."
    ]


@pytest.mark.parametrize("options", [(), ("--verify",)])
def test_what_is_no_checkpoint(
    options: tuple[str, ...], written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cut").write_bytes(written.read_bytes()[:-100])
    (tmp_path / "text").write_text("# A heading\n")
    (tmp_path / "empty").touch()
    for name in ("cut", "text", "empty"):
        code, text = inspect(tmp_path / name, capsys, *options)
        assert code == 1
        assert text.splitlines()[-1] == (
            f"The checkpoint {tmp_path / name} cannot be used: it is not a file that torch.save has written, or only"
            " part of one."
        )
    with zipfile.ZipFile(tmp_path / "archive", "w") as archive:
        archive.writestr("a", "b")
    code, text = inspect(tmp_path / "archive", capsys, *options)
    assert code == 1
    # With --verify its headers are looked at first; they are not those that torch writes.
    assert ("cannot be used: the header" if options else "cannot be used: torch cannot read it (") in text, text


def test_other_files_of_torch_s(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"a": torch.zeros(3), "b": {"c": torch.zeros(2, dtype=torch.bfloat16)}}, tmp_path / "weights.pt")
    code, text = inspect(tmp_path / "weights.pt", capsys, "--verify")
    assert (code, lines(text)["weights"]) == (0, "5 elements in 2 tensors, bfloat16, float32")
    assert lines(text)["form"] == "one file that torch.save wrote, but not a Lightning checkpoint"
    torch.save({"a": torch.zeros(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    code, text = inspect(tmp_path / "old.pt", capsys, "--verify")
    assert code == 0
    assert text.splitlines()[-1] == "it can be read; files in this old torch format have no checksums"
    torch.save({"hyper_parameters": argparse.Namespace(a=1)}, tmp_path / "objects.ckpt")
    code, text = inspect(tmp_path / "objects.ckpt", capsys)
    assert code == 0
    assert lines(text)["objects"] == "argparse.Namespace: reading them can run code from the file"
    assert text.splitlines()[-1] == "it has not been read; --verify checks its checksums"
    assert inspect(tmp_path / "objects.ckpt", capsys, "--verify")[1].endswith("\nwhole, to the last byte\n")


def test_a_url(bucket: str, written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from lightning_replica.checkpoint import store
    from lightning_replica.checkpoint.location import Url

    store.upload(written, Url(f"{bucket}/one.ckpt"))
    code, text = inspect(f"{bucket}/one.ckpt", capsys, "--verify")
    assert (code, lines(text)["weights"]) == (0, "66 elements in 2 tensors, float32")
    assert text.splitlines()[-1] == "whole, to the last byte"
