"""The newest whole checkpoint is found, whatever the others have become; what is ours is kept in order, and no more."""

import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_replica.checkpoint import publish
from lightning_replica.checkpoint.directory import CheckpointDirectory, find
from lightning_replica.errors import CheckpointError, ConfigurationError
from tests.checkpoint.small import directory_of, load, save
from tests.support.typed import on_disk

NOBODY = 65534


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def flip(file: Path, place: int | None = None) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2 if place is None else place] ^= 1
    file.write_bytes(content)


def test_the_newest_is_that_of_the_last_step_whatever_its_name_and_time(tmp_path: Path) -> None:
    directory = directory_of(tmp_path / "deep" / "run", 9, 120)
    save(directory.path / "zzz", 20, 20)
    save(directory.path / "unknown", None, 0)
    (on_disk(directory.path) / "lightning_logs").mkdir()
    os.utime(on_disk(directory.path_of(9)))
    latest = directory.latest(verify=True)
    assert latest.path == directory.path_of(120) == directory.path / "step_00000120"
    assert latest.manifest is not None
    assert (latest.manifest.step, latest.problems) == (120, ())
    assert load(latest.path) == 120
    assert [entry.path.name for entry in directory.entries()] == ["step_00000120", "zzz", "step_00000009", "unknown"]
    assert (on_disk(directory.path) / "latest").read_text() == "step_00000120\n"


def test_of_two_of_one_step_the_last_saved_is_the_newest(tmp_path: Path) -> None:
    directory = directory_of(tmp_path, 5)
    later = save(tmp_path / "a", 5, 5.5)
    assert directory.latest().path == later
    save(directory.path_of(5), 5, 5.75)
    assert load(directory.latest().path) == 5.75


def test_an_empty_directory_has_none(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        latest = CheckpointDirectory(path).latest()
        assert (latest.path, latest.manifest, latest.problems) == (None, None, ())


def empty(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()


def replace_by_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("")


DAMAGE: dict[str, tuple[Callable[[Path], object], str, bool]] = {  # what it does, what is said, whether sizes show it
    "shard truncated": (lambda p: os.truncate(p / "__0_0.distcp", 900), "__0_0.distcp has 900 bytes", True),
    "shard missing": (lambda p: (p / "__0_0.distcp").unlink(), "__0_0.distcp is missing", True),
    "manifest missing": (lambda p: (p / "manifest.json").unlink(), "it has no manifest.json", True),
    "manifest empty": (lambda p: os.truncate(p / "manifest.json", 0), "its manifest.json cannot be read", True),
    "all missing": (empty, "it has no manifest.json", True),
    "not a directory": (replace_by_file, "cannot be", True),
    "shard flipped": (lambda p: flip(p / "__0_0.distcp"), "the checksum of __0_0.distcp differs", False),
    "plain flipped": (lambda p: flip(p / "plain.pt"), "the checksum of plain.pt differs", False),
    "contents flipped": (lambda p: flip(p / "contents.pt"), "size or checksum of contents.pt differs", True),
    "metadata flipped": (lambda p: flip(p / ".metadata"), "size or checksum of .metadata differs", True),
    "manifest flipped": (lambda p: flip(p / "manifest.json"), "its manifest.json cannot be read", True),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_one_is_named_and_the_one_before_is_found(tmp_path: Path, damage: str) -> None:
    directory = directory_of(tmp_path, 10, 20)
    do, said, sizes_show_it = DAMAGE[damage]
    do(on_disk(directory.path_of(20)))
    latest = directory.latest(verify=not sizes_show_it)
    assert latest.path == directory.path_of(10)
    assert load(latest.path) == 10
    first = latest.problems[0]
    assert str(directory.path_of(20)) in first
    assert said in first or damage == "not a directory"
    assert latest.problems[-1].startswith(f"The tracker {tmp_path / 'latest'} names 'step_00000020'") == sizes_show_it
    if not sizes_show_it:  # who does not ask for checksums finds out when it is loaded, and nothing else happens
        with pytest.raises(CheckpointError, match=said):
            load(directory.latest().path)


def test_any_flipped_byte_of_a_manifest_shows(tmp_path: Path) -> None:
    """Also one that would make an old checkpoint the newest."""
    directory = directory_of(tmp_path, 1)
    file = on_disk(directory.path_of(1)) / "manifest.json"
    for place in range(file.stat().st_size):
        flip(file, place)
        assert directory.latest().path is None, place
        flip(file, place)
    assert load(directory.latest().path) == 1


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    directory = directory_of(tmp_path / "run", 1)
    on_disk(directory.path_of(2)).symlink_to(save(tmp_path / "elsewhere", 2, 2))
    latest = directory.latest()
    assert latest.path == directory.path_of(1)
    assert latest.problems == (
        f"{directory.path_of(2)} is a symbolic link, which is not followed. Name its target instead.",
    )
    with pytest.raises(CheckpointError, match="is a symbolic link"):
        directory.track("step_00000002")
    with pytest.raises(ConfigurationError, match=r"step_00000002 has a name that a run uses"):
        directory.prepare()


@pytest.mark.parametrize("name", ["../elsewhere", "/etc", "..", ".", "", "a/b", "a\0b", "step_00000007"])
def test_the_tracker_names_whole_checkpoints_of_the_directory_only(tmp_path: Path, name: str) -> None:
    directory = directory_of(tmp_path / "run", 1)
    save(tmp_path / "elsewhere", 2, 2)
    with pytest.raises(CheckpointError):
        directory.track(name)
    assert directory.tracked == "step_00000001"
    (on_disk(directory.path) / "latest").write_bytes(name.encode() + b"\xff\n")
    latest = directory.latest()
    assert latest.path == directory.path_of(1)
    assert latest.problems[0].startswith(f"The tracker {directory.path / 'latest'} names ")


def test_a_tracker_that_names_what_is_gone_is_told_of(tmp_path: Path) -> None:
    directory = directory_of(tmp_path, 1, 2)
    shutil.rmtree(on_disk(directory.path_of(2)))
    latest = directory.latest()
    assert latest.path == directory.path_of(1)
    assert latest.problems == (
        f"The tracker {tmp_path / 'latest'} names 'step_00000002':"
        f" There is no sharded checkpoint at {directory.path_of(2)}.",
    )
    shutil.rmtree(on_disk(directory.path_of(1)))
    assert directory.latest().path is None
    assert len(directory.latest().problems) == 1


def test_only_the_last_are_retained(tmp_path: Path) -> None:
    directory = directory_of(tmp_path, 1, 2, 3, 4, 5)
    save(tmp_path / "best", 0, 0)
    (tmp_path / "step_notes").mkdir()
    flip(on_disk(directory.path_of(4)) / "manifest.json")
    directory.track("step_00000001")
    assert directory.retain(2) == [directory.path_of(2)]
    assert load(directory.latest().path) == 5
    left = ["best", "latest", "step_00000001", "step_00000003", "step_00000004", "step_00000005", "step_notes"]
    assert names(tmp_path) == left
    directory.track("step_00000005")
    assert directory.retain(1) == [directory.path_of(3), directory.path_of(1)]
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ConfigurationError, match="keep_last=.* must be a whole number, 1 or more"):
            directory.retain(wrong)  # type: ignore[arg-type]


def test_the_start_tidies_up_after_crashes_and_touches_nothing_else(tmp_path: Path) -> None:
    directory = directory_of(tmp_path, 1, 2, 3)
    on_disk(directory.path_of(1)).rename(publish.aside(on_disk(directory.path_of(1))))  # killed between two renames
    shutil.copytree(on_disk(directory.path_of(2)), publish.aside(on_disk(directory.path_of(2))))  # killed after them
    shutil.copytree(on_disk(directory.path_of(3)), publish.aside(on_disk(directory.path_of(3))))
    flip(on_disk(directory.path_of(3)) / "contents.pt")  # so the former is needed
    for name in ("step_00000004.tmp-01234567", "epoch=1.ckpt.tmp-89abcdef", "step_00000004.gone-01234567"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__3_0.distcp").write_bytes(b"half")
    (tmp_path / "latest.tmp").write_text("step_")
    foreign = ["data.tmp-20240101", "step_00000004.tmp", "step_1", "notes.txt", "logs.tmp-01234567", "x.gone-01234567"]
    for name in foreign[:3]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("")
    for name in foreign[3:5]:
        (tmp_path / name).write_text("")
    (tmp_path / foreign[5]).symlink_to(tmp_path / foreign[0])
    directory.prepare()
    kept = ["latest", "step_00000001", "step_00000002", "step_00000003", "step_00000003.old"]
    assert names(tmp_path) == sorted([*kept, *foreign])
    latest = directory.latest()
    assert latest.path == publish.aside(on_disk(directory.path_of(3)))
    assert load(latest.path) == 3
    save(directory.path_of(3), 3, 3.5)
    directory.prepare()
    assert load(directory.latest().path) == 3.5
    assert names(tmp_path) == sorted([*kept[:-1], *foreign])


@pytest.mark.parametrize("what", ["step_00000002", "step_00000002.old", "latest", "latest.tmp"])
def test_foreign_things_under_names_that_are_needed_are_refused(tmp_path: Path, what: str) -> None:
    directory = directory_of(tmp_path, 1)
    (tmp_path / what).unlink(missing_ok=True)
    (tmp_path / what).mkdir()
    (tmp_path / what / "thesis.tex").write_text("years of work")
    before = names(tmp_path)
    with pytest.raises(
        ConfigurationError, match=rf"dirpath=.*{what} (is not|has a name) .* Move it away\. Choose another"
    ):
        directory.prepare()
    assert names(tmp_path) == before
    assert names(tmp_path / what) == ["thesis.tex"]


def test_a_directory_that_cannot_be_written_is_found_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ways = [tmp_path / "file", tmp_path / "file" / "run", Path("/proc/self"), Path("/proc/run")]
    for path in ways:  # of which root may write to none either
        with pytest.raises(ConfigurationError, match=rf"dirpath='{path}' cannot be written to: .* Choose another"):
            CheckpointDirectory(path).prepare()
    if os.geteuid() != 0:  # modes do not bind root
        (tmp_path / "shut").mkdir(mode=0o500)
        with pytest.raises(ConfigurationError, match=r"Permission denied"):
            CheckpointDirectory(tmp_path / "shut").prepare()


def test_a_folder_that_this_user_may_not_read() -> None:
    """`lost+found`, in the root of a file system."""
    with tempfile.TemporaryDirectory(dir="/tmp") as place:  # below that of the tests, only this user may look
        (Path(place) / "lost+found").mkdir(mode=0o700 if os.geteuid() == 0 else 0)
        os.chown(place, NOBODY if os.geteuid() == 0 else -1, -1)

        def use() -> None:
            if os.geteuid() == 0:
                os.setuid(NOBODY)
            directory = CheckpointDirectory(place)
            directory.prepare()
            save(directory.path_of(1), 1, 1.5)
            save(directory.path_of(2), 2, 2.5)
            assert directory.retain(1) == [directory.path_of(1)]
            assert directory.latest().path == directory.path_of(2)

        used = multiprocessing.get_context("fork").Process(target=use)
        used.start()
        used.join()
        assert used.exitcode == 0


def test_steps_are_whole_numbers(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    assert directory.path_of(123456789).name == "step_123456789"
    for wrong in (-1, 1.0, "../x"):
        with pytest.raises(ConfigurationError, match="step=.* must be a whole number"):
            directory.path_of(wrong)  # type: ignore[arg-type]


def test_a_path_names_a_checkpoint_or_the_newest_in_it(tmp_path: Path) -> None:
    directory = directory_of(tmp_path, 1, 2)
    assert find(tmp_path) == (directory.path_of(2), ())
    assert find(directory.path_of(1)) == (directory.path_of(1), ())
    on_disk(directory.path_of(1)).rename(publish.aside(on_disk(directory.path_of(1))))
    assert find(on_disk(directory.path_of(1)))[0] == publish.aside(on_disk(directory.path_of(1)))
    with pytest.raises(CheckpointError, match="There is no sharded checkpoint at .*/7"):
        find(tmp_path / "7")
    flip(on_disk(directory.path_of(2)) / ".metadata")
    path, problems = find(tmp_path)
    assert path == publish.aside(on_disk(directory.path_of(1)))
    assert "checksum of .metadata" in problems[0]
    (tmp_path / "other").mkdir()
    with pytest.raises(CheckpointError, match=r"There is no checkpoint at .*other: it has no manifest.json. No dir"):
        find(tmp_path / "other")
