"""The default ``.ckpt``: whatever bit of it flips, a load says so or gives the very same contents."""

import io
import os
import random
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO

from lightning_replica._compat.lightning import writes_archives
from lightning_replica.checkpoint import store
from lightning_replica.checkpoint.archive import check_archive, reading
from lightning_replica.checkpoint.location import Location, Url
from lightning_replica.errors import CheckpointError
from tests.support import job, world
from tests.support.bits import same
from tests.support.job import Case

FLIPS = 200  # of each kind


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A checkpoint that Lightning has written, with an optimizer's state, without us."""
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path_factory.mktemp("written"),
        enable_checkpointing=False,
        limit_val_batches=0,
    )
    trainer.fit(BoringModel())
    file = tmp_path_factory.mktemp("written") / "one.ckpt"
    trainer.save_checkpoint(file)
    return file.read_bytes()


def load(path: Location) -> Any:
    """As the strategy does."""
    check_archive(path)
    with reading(path):
        return torch.load(path if isinstance(path, Path) else io.BytesIO(store.read(path) or b""), weights_only=True)


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def in_largest(content: bytes) -> int:
    """A bit of the largest record, which is a tensor."""
    record = max(zipfile.ZipFile(io.BytesIO(content)).infolist(), key=lambda each: each.file_size)
    lengths = content[record.header_offset + 26 : record.header_offset + 30]
    name, extra = int.from_bytes(lengths[:2], "little"), int.from_bytes(lengths[2:], "little")
    return 8 * (record.header_offset + 30 + name + extra + record.file_size // 2)


def bits(content: bytes) -> Iterable[int]:
    """Anywhere; and where the archive says what it holds, which is read before anything else."""
    dice = random.Random(14)
    directory = 8 * zipfile.ZipFile(io.BytesIO(content)).start_dir
    return [
        *(dice.randrange(8 * len(content)) for _ in range(FLIPS)),
        *(dice.randrange(directory, 8 * len(content)) for _ in range(FLIPS)),
    ]


def test_any_flipped_bit_shows_or_changes_nothing(written: bytes, tmp_path: Path) -> None:
    whole, path = torch.load(io.BytesIO(written), weights_only=True), tmp_path / "one.ckpt"
    found = {"named": 0, "the same": 0, "silent without the check": 0}
    for bit in bits(written):
        path.write_bytes(flipped(written, bit))
        try:
            assert same(load(path), whole), f"bit {bit}"
            found["the same"] += 1
        except CheckpointError as error:
            found["named"] += str(error).startswith(f"The checkpoint {path} cannot be used: ")
            found["silent without the check"] += loads_otherwise(path, whole)
    assert found["named"] + found["the same"] == 2 * FLIPS
    assert min(found.values()) > 0, found


def loads_otherwise(path: Path, whole: Any) -> bool:
    try:
        return not same(torch.load(path, weights_only=True), whole)
    except Exception:
        return False


def test_a_record_that_is_called_a_directory(written: bytes, tmp_path: Path) -> None:
    """All checksums are right, and torch leaves the tensor's memory as it finds it."""
    archive = zipfile.ZipFile(io.BytesIO(written))
    name = next(name for name in archive.namelist() if name.endswith("/data/0"))
    entry = written.index(name.encode(), archive.start_dir) - 46
    path = tmp_path / "one.ckpt"
    path.write_bytes(flipped(written, 8 * (entry + 38) + 4))
    assert zipfile.ZipFile(path).testzip() is None
    with pytest.raises(CheckpointError, match=f"the header of its record {name} is damaged"):
        load(path)


@pytest.mark.parametrize("end", [0, 3, 100, -100, -1])
def test_a_file_that_was_cut_short(end: int, written: bytes, tmp_path: Path) -> None:
    path = tmp_path / "one.ckpt"
    path.write_bytes(written[:end])
    with pytest.raises(CheckpointError):
        load(path)


def test_files_without_checksums_are_loaded_as_ever(tmp_path: Path) -> None:
    content, path = {"weight": torch.arange(9.0)}, tmp_path / "one.ckpt"
    torch.save(content, path, _use_new_zipfile_serialization=False)
    assert same(load(path), content)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(content, path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert same(load(path), content)


def test_in_a_store(written: bytes, bucket: str) -> None:
    whole, url = torch.load(io.BytesIO(written), weights_only=True), Url(f"{bucket}/one.ckpt")
    store.write(url, written)
    assert same(load(url), whole)
    store.write(url, flipped(written, in_largest(written)))
    with pytest.raises(CheckpointError, match=f"The checkpoint {url} cannot be used: the checksum of its record"):
        load(url)


class Packed(CheckpointIO):
    """A plugin of a user's, with a format of its own: no archive as torch writes it."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("packed", buffer.getvalue())

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        with zipfile.ZipFile(path) as archive:
            return dict(torch.load(io.BytesIO(archive.read("packed")), weights_only=weights_only))

    def remove_checkpoint(self, path: Any) -> None:
        os.remove(path)


def packs(case: Case, out: Path) -> None:
    job.run(case, out, checkpoint_io=Packed())


def test_plugins() -> None:
    assert all(map(writes_archives, (TorchCheckpointIO(), AsyncCheckpointIO(TorchCheckpointIO()))))
    assert not any(map(writes_archives, (Packed(), AsyncCheckpointIO(Packed()), None)))


def newest(out: Path) -> Path:
    return max((out / "checkpoints").iterdir(), key=lambda path: path.stat().st_mtime_ns)


def test_a_fit_does_not_go_on_from_a_damaged_one(tmp_path: Path) -> None:
    once = world.run(Case(devices=2, epochs=1), tmp_path / "once")
    assert once.code == 0, once.logs
    path = newest(tmp_path / "once")
    path.write_bytes(flipped(path.read_bytes(), in_largest(path.read_bytes())))
    refused = world.run(Case(devices=2, load=str(path)), tmp_path / "refused")
    assert refused.code == 1
    assert f"The checkpoint {path} cannot be used: the checksum of its record" in refused.logs
    assert not any(refused.batches)


def test_what_another_plugin_has_written_is_its_own_business(tmp_path: Path) -> None:
    once = world.run(Case(devices=2, epochs=1), tmp_path / "once", target=packs)
    assert once.code == 0, once.logs
    again = world.run(Case(devices=2, load=str(newest(tmp_path / "once"))), tmp_path / "again", target=packs)
    assert again.code == 0, again.logs
