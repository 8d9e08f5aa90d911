"""A published directory is there as a whole, and knows when it was damaged."""

import errno
import json
import os
import shutil
import stat
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_replica._compat.packages import chosen
from lightning_replica.checkpoint import publish, verification
from lightning_replica.checkpoint.manifest import FileInfo, Manifest
from lightning_replica.core.points import listen
from lightning_replica.errors import CheckpointError


def write(path: Path, content: bytes = b"some content") -> Path:
    with publish.staged(path) as directory:
        for name in ("a", "b"):
            publish.write_file(directory / name, content)
        files = {name: FileInfo.of(directory / name) for name in ("a", "b")}
        publish.publish(directory, path, Manifest(files, 4, 2, "element", 7, "gasp", {1: "node3"}))
    return path


def test_what_is_published_is_what_was_written(tmp_path: Path) -> None:
    path = write(tmp_path / "deep" / "step=1.ckpt")
    manifest = verification.verify(path)
    assert (manifest.world_size, manifest.replicas, manifest.partition) == (4, 2, "element")
    assert (manifest.step, manifest.written_for, manifest.writers) == (7, "gasp", {1: "node3"})
    assert manifest.files["a"] == FileInfo(12, zlib.crc32(b"some content"))
    assert set(manifest.versions) == {"lightning-replica", chosen().distribution, "torch"}
    assert verification.read_file(path, "b") == b"some content"
    assert sorted(file.name for file in path.parent.iterdir()) == ["step=1.ckpt"]


def edit(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def do(path: Path) -> None:
        manifest = json.loads((path / "manifest.json").read_text())
        change(manifest)
        del manifest["crc32"]
        manifest["crc32"] = zlib.crc32(json.dumps(manifest, sort_keys=True).encode())
        (path / "manifest.json").write_text(json.dumps(manifest))

    return do


def replace_by_directory(path: Path) -> None:
    (path / "b").unlink()
    (path / "b").mkdir()


def replace_by_link(path: Path) -> None:
    (path / "b").rename(path.parent / "elsewhere")
    (path / "b").symlink_to(path.parent / "elsewhere")


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped": (lambda path: (path / "b").write_bytes(b"some c0ntent"), r"the checksum of b differs from what was"),
    "truncated": (lambda path: (path / "b").write_bytes(b"some"), r"b has 4 bytes, but was written with 12"),
    "missing": (lambda path: (path / "b").unlink(), r"b is missing"),
    "a directory": (replace_by_directory, r"b is missing"),
    "link": (replace_by_link, r"b is a symbolic link"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), r"it has no manifest.json, so its save was"),
    "no json": (lambda path: (path / "manifest.json").write_text("{"), r"manifest.json cannot be read \(JSONDecode"),
    "not a dict": (lambda path: (path / "manifest.json").write_text("[]"), r"manifest.json cannot be read \(TypeErr"),
    "no files": (edit(lambda m: m.pop("files")), r"manifest.json cannot be read \(KeyError: 'files'"),
    "escape": (edit(lambda m: m["files"].update({"../x": m["files"]["a"]})), r"lists '../x', which is not a file name"),
    "absolute": (edit(lambda m: m["files"].update({"/etc/fstab": m["files"]["a"]})), r"lists '/etc/fstab', which is"),
    "edited": (
        lambda path: (path / "manifest.json").write_text(
            (path / "manifest.json").read_text().replace("node3", "node4")
        ),
        r"manifest.json cannot be read \(ValueError: its checksum differs",
    ),
    "format": (edit(lambda m: m.update(format=9)), r"has format 9, but this version.* reads format 3.*wrote it: \{'li"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(tmp_path: Path, damage: str) -> None:
    do, message = DAMAGE[damage]
    path = write(tmp_path / "step")
    verification.verify(path)
    do(path)
    with pytest.raises(CheckpointError, match=message) as raised:
        verification.verify(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing", "link", "no manifest"])
def test_a_damaged_file_is_not_read(tmp_path: Path, damage: str) -> None:
    path = write(tmp_path / "step")
    DAMAGE[damage][0](path)
    with pytest.raises(CheckpointError, match=r"size or checksum of b differs|b is |no manifest"):
        verification.read_file(path, "b")


def test_checksums_are_shared(tmp_path: Path) -> None:
    path = write(tmp_path / "step")
    (path / "b").write_bytes(b"some c0ntent")
    verification.verify(path, share=(0, 2))
    with pytest.raises(CheckpointError, match="the checksum of b"):
        verification.verify(path, share=(1, 2))


def leave(path: Path) -> Path:
    """What a killed save leaves."""
    shutil.copytree(write(path.parent / "source"), unfinished := path.with_name(f"{path.name}.tmp-0123abcd"))
    publish.discard(path.parent / "source")
    (unfinished / "manifest.json").unlink()
    return unfinished


def test_what_was_never_finished_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "step"
    unfinished = leave(path)
    with pytest.raises(
        CheckpointError, match=r"no sharded checkpoint at .*step. step\.tmp-0123abcd beside it was never"
    ):
        verification.verify(path)
    write(path)
    assert sorted(file.name for file in path.iterdir()) == ["a", "b", "manifest.json"]
    assert not unfinished.exists()
    with pytest.raises(CheckpointError, match=r"There is no sharded checkpoint at .*nowhere\.$"):
        verification.verify(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"There is no sharded checkpoint at .*deeper\.$"):
        verification.verify(tmp_path / "nowhere" / "deeper")


def test_what_fails_leaves_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "step", b"former")
    message = r"step\.tmp-[0-9a-f]{8}/b/c could not be written: No such file"
    with pytest.raises(CheckpointError, match=message), publish.staged(path) as directory:
        publish.write_file(directory / "b" / "c", b"newer")
    assert verification.read_file(path, "a") == b"former"
    assert [file.name for file in tmp_path.iterdir()] == ["step"]


def test_two_saves_of_one_path_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "step"
    with publish.staged(path) as abandoned:
        publish.write_file(abandoned / "a", b"of the first")
        write(path, b"of the second")
        with pytest.raises(CheckpointError, match="could not be written: No such file or directory"):
            publish.write_file(abandoned / "b", b"of the first")
    assert [entry.name for entry in tmp_path.iterdir()] == ["step"]
    assert verification.read_file(verification.published(path), "b") == b"of the second"
    verification.verify(path)


@pytest.mark.parametrize("foreign", ["files", "a directory", "aside"])
def test_what_something_else_wrote_is_not_replaced(tmp_path: Path, foreign: str) -> None:
    path = tmp_path / "step"
    holds = path.with_name("step.old") if foreign == "aside" else path
    holds.mkdir()
    if foreign == "a directory":
        (holds / "manifest.json").write_text("{}")
        (holds / "data").mkdir()
    else:
        (holds / "data").write_text("years of work")
    with pytest.raises(CheckpointError, match=rf"{holds} is not replaced .* it holds ('data'|files, but no manifest)"):
        write(path)
    assert [entry.name for entry in tmp_path.iterdir()] == [holds.name]


class Crash(BaseException):
    pass


def crash(point: str) -> None:
    if point == "publish":
        raise Crash


def test_a_crash_while_replacing_leaves_the_former(tmp_path: Path) -> None:
    path = write(tmp_path / "step", b"former")
    stop = listen(crash)
    with pytest.raises(Crash):
        write(path, b"newer")
    stop()
    assert not path.exists()
    verification.verify(path)
    assert verification.read_file(verification.published(path), "a") == b"former"
    with publish.staged(path):  # the next one begins, and this shall not cost us the former
        assert verification.read_file(verification.published(path), "a") == b"former"
    write(path, b"newest")
    assert verification.read_file(verification.published(path), "a") == b"newest"
    assert not (tmp_path / "step.old").exists()


@pytest.mark.parametrize("before", ["file", "link"])
def test_whatever_has_the_name_is_replaced(tmp_path: Path, before: str) -> None:
    path, other = tmp_path / "last", write(tmp_path / "other")
    path.write_text("a file") if before == "file" else path.symlink_to(other)
    write(path, b"newest")
    assert not path.is_symlink()
    assert verification.read_file(path, "a") == b"newest"
    assert verification.read_file(other, "a") == b"some content"


@pytest.mark.parametrize("fails", ["sync", "discard"])
def test_what_has_its_name_is_written(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What follows may fail. A run that took the save for failed would end without it, or write it again."""
    path = tmp_path / "step=1.ckpt"
    write(path)
    calls: list[Path] = []
    original = getattr(publish, fails)

    def fail(at: Path) -> None:
        calls.append(at)
        if path.is_dir() and (path / "b").read_bytes() == b"other content":
            raise OSError(errno.EIO, "Input/output error")
        original(at)

    monkeypatch.setattr(publish, fails, fail)
    write(path, b"other content")
    assert calls
    assert verification.verify(path)
    assert verification.read_file(path, "b") == b"other content"
    assert "is written, but its name could not be flushed" in caplog.text


@pytest.mark.parametrize("error", [errno.EINVAL, errno.ENOTSUP])
def test_directories_that_cannot_be_flushed(error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in some network file systems. What a file holds must be flushed nevertheless."""
    refused: list[bool] = []

    def fsync(descriptor: int) -> None:
        refused.append(stat.S_ISDIR(os.fstat(descriptor).st_mode))
        if refused[-1]:
            raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "fsync", fsync)
    publish.make_directory(tmp_path / "a" / "b")
    assert verification.verify(write(tmp_path / "a" / "b" / "step"))
    assert set(refused) == {True, False}
    monkeypatch.setattr(os, "fsync", lambda descriptor: os.close(-1))
    with pytest.raises(OSError, match="Bad file descriptor"):
        publish.sync(tmp_path / "a" / "b")
