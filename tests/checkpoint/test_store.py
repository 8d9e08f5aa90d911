"""Checkpoints in a real store of objects: written by real ranks, read by others, damaged, copied, tidied."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from lightning_replica import ConfigurationError
from lightning_replica.checkpoint import store, verification
from lightning_replica.checkpoint.attempts import attempts_at
from lightning_replica.checkpoint.directory import CheckpointDirectory, find
from lightning_replica.checkpoint.location import Url
from lightning_replica.checkpoint.which_storage import storage_of
from lightning_replica.errors import CheckpointError
from tests.checkpoint.job import load_all, save_all
from tests.checkpoint.small import directory_of, load, save
from tests.checkpoint.test_sharded import per_name
from tests.checkpoint.test_trouble import kill_at, load_again
from tests.support.bucket import changes, settings, trouble
from tests.support.ranks import run_ranks
from tests.support.typed import in_store

FILES = [".metadata", "__0_0.distcp", "contents.pt", "plain.pt"]


def objects(url: Url | str) -> list[str]:
    return sorted(store.objects(Url(str(url))))


def the_attempt(url: Any) -> Url:
    (attempt,) = attempts_at(url)
    return attempt.url


def there(rank: int, kv: Any, environment: dict[str, str], function: Callable[..., Any], *args: Any) -> Any:
    """``function`` in a process that finds the store."""
    os.environ.update(environment)
    return function(rank, kv, *args)


def test_every_world_reads_what_another_wrote(bucket: str) -> None:
    wanted = [["AdamW", 2, "element"], ["bf16", 2, "parameter"], ["two", 2, "element"]]
    written = per_name(run_ranks(4, there, settings(), save_all, 4, wanted, bucket))
    assert len(written) == 3
    for name in written:
        names = [key.partition("/")[2] for key in objects(f"{bucket}/{name}")]
        ranks = [f"__{rank}_0.distcp" for rank in range(4)]
        assert sorted(names) == sorted([".metadata", *ranks, "contents.pt", "manifest.json", "plain.pt"])
    for size, replicas in ((2, 1), (3, 3), (4, 2)):
        again = [[name, replicas, name.rsplit("-", 1)[1]] for name in written]
        for key, found in per_name(run_ranks(size, there, settings(), load_all, size, again, bucket)).items():
            expected = written[key.split(" ")[0]]
            assert found["saved"] == expected["saved"], key
            assert size != 4 or found["after"] == expected["after"] != found["saved"], key


@pytest.mark.parametrize(("victim", "point"), [(1, "shard"), (1, "save"), (0, "save")])
def test_a_rank_killed_while_saving_costs_nothing_that_was_published(bucket: str, victim: int, point: str) -> None:
    results = run_ranks(3, there, settings(), kill_at, bucket, victim, point)
    assert results[victim] == {"died": -9}
    survivors = [result for rank, result in enumerate(results) if rank != victim]
    assert all(result["error"] for result in survivors), survivors
    loaded = run_ranks(3, there, settings(), load_again, bucket)
    for rank, result in enumerate(results):
        if rank != victim:
            assert loaded[rank]["saved"] == result["saved"], loaded[rank].get("raised")
    CheckpointDirectory(bucket).prepare()
    assert len(attempts_at(Url(f"{bucket}/step"))) == 1


def test_the_manifest_comes_last_and_what_it_replaces_goes_after_it(bucket: str) -> None:
    directory = directory_of(bucket, 1)
    former = the_attempt(directory.path_of(1))
    trouble("refused", 1 << 30)
    save(directory.path_of(1), 1, 1.5)
    told = [line.rpartition("/")[2] for line in changes()]
    assert sorted(told[:4]) == FILES
    assert told[4:] == ["manifest.json", told[-1], told[-1]], "two removals, of the manifest and of the rest"
    assert the_attempt(directory.path_of(1)) != former
    assert load(directory.path_of(1)) == 1.5
    assert (directory.tracked, directory.latest(verify=True).problems) == ("step_00000001", ())


def damage(url: Url, name: str, change: Callable[[bytearray], object] | None) -> None:
    file = the_attempt(url) / name
    if change is None:
        store.remove([file])
        return
    content = bytearray(store.read(file) or b"")
    change(content)
    store.write(file, bytes(content))


def flip(content: bytearray) -> None:
    content[len(content) // 2] ^= 1


def truncate(content: bytearray) -> None:
    del content[-1:]


DAMAGE: dict[str, tuple[str, Callable[[bytearray], object] | None, str, bool]] = {  # ..., whether sizes show it
    "shard truncated": ("__0_0.distcp", truncate, r"__0_0.distcp has \d+ bytes, but was written with", True),
    "shard missing": ("__0_0.distcp", None, "__0_0.distcp is missing", True),
    "shard flipped": ("__0_0.distcp", flip, "the checksum of __0_0.distcp differs", False),
    "contents flipped": ("contents.pt", flip, "size or checksum of contents.pt differs", True),
    "metadata flipped": (".metadata", flip, "size or checksum of .metadata differs", True),
    "manifest flipped": ("manifest.json", flip, "its manifest.json cannot be read", True),
    "manifest truncated": ("manifest.json", truncate, "its manifest.json cannot be read", True),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_one_is_named_and_the_one_before_is_found(bucket: str, how: str) -> None:
    directory = directory_of(bucket, 10, 20)
    name, change, said, sizes_show_it = DAMAGE[how]
    damage(in_store(directory.path_of(20)), name, change)
    latest = directory.latest(verify=not sizes_show_it)
    assert latest.path == directory.path_of(10)
    assert load(latest.path) == 10
    assert f"{directory.path_of(20)}/" in latest.problems[0]
    assert re.search(said, latest.problems[0])
    with pytest.raises(CheckpointError, match=said.replace("size or ", "(size or )?")):
        load(directory.path_of(20))


def test_of_two_whole_attempts_the_newer_is_read_and_of_a_damaged_one_the_other(bucket: str) -> None:
    """As a kill between the manifest and what it replaces leaves them."""
    directory = directory_of(bucket, 1)
    path, system = directory.path_of(1), fsspec.filesystem("s3")
    former = the_attempt(path)
    kept = {name: store.read(former / name) for name in objects(former)}
    save(path, 1, 1.5)
    newer = the_attempt(path)
    for name, content in kept.items():
        store.write(former / name, content or b"")
    assert verification.published(path).directory == newer
    assert load(directory.latest().path) == 1.5
    system.rm(f"{newer}/plain.pt")
    assert verification.published(path).directory == former
    latest = directory.latest(verify=True)
    assert (latest.path, latest.problems, load(latest.path)) == (path, (), 1.0)
    directory.prepare()
    assert the_attempt(path) == former
    assert load(path) == 1.0


def test_what_may_not_be_removed_stays_beside_what_replaces_it(bucket: str, caplog: pytest.LogCaptureFixture) -> None:
    directory = directory_of(bucket, 1)
    trouble("refused", 6)  # after four files and the manifest
    save(directory.path_of(1), 1, 1.5)
    (line,) = caplog.messages
    assert re.match(rf"{directory.path_of(1)} is written, but the former checkpoint could not be .*Denied", line)
    assert len(attempts_at(in_store(directory.path_of(1)))) == 2
    assert load(directory.latest(verify=True).path) == 1.5
    trouble("refused", 1 << 30)
    directory.prepare()
    assert load(the_attempt(directory.path_of(1))) == 1.5


def test_the_start_removes_what_a_crash_has_left_and_nothing_else(bucket: str) -> None:
    directory = directory_of(bucket, 1)
    theirs = ["step_00000001/notes.txt", "step_00000002/0123abcd/thesis.tex", "logs/version_0/events", "notes.txt"]
    ours = ["step_00000002/89abcdef/plain.pt", "step_00000003/0123abcd/__1_0.distcp", "epoch=1.ckpt/0123abcd/.metadata"]
    theirs.append("step_00000002/0123abcd/plain.pt")  # beside something else
    whole = objects(bucket)
    for name in (*theirs, *ours):
        store.write(Url(f"{bucket}/{name}"), b"x")
    assert directory.latest().problems == ()
    with pytest.raises(CheckpointError, match="step_00000003. 0123abcd in it was never finished; it is not used"):
        load(directory.path_of(3))
    directory.prepare()
    assert objects(bucket) == sorted(whole + theirs)
    directory.track(save(directory.path_of(2), 2, 2.0).name)
    assert directory.retain(1) == [directory.path_of(1)]
    assert {"step_00000001/notes.txt", "step_00000002/0123abcd/thesis.tex"} < set(objects(bucket))
    assert load(directory.latest(verify=True).path) == 2.0


def test_tracker_and_retention(bucket: str) -> None:
    directory = directory_of(bucket, 1, 2, 3)
    save(directory.path / "best", 0, 0)
    directory.track("step_00000001")
    assert directory.retain(1) == [directory.path_of(2)]
    assert [entry.path.name for entry in directory.entries()] == ["step_00000003", "step_00000001", "best"]
    for wrong in ("step_00000002", "../run", "", "a/b"):
        with pytest.raises(CheckpointError):
            directory.track(wrong)
    assert directory.tracked == "step_00000001"
    store.write(directory.path / "latest", b"step_00000002\n")  # type: ignore[arg-type]
    assert directory.latest().problems == (
        f"The tracker {bucket}/latest names 'step_00000002': There is no sharded checkpoint at {directory.path_of(2)}.",
    )


def test_copies_between_a_disk_and_a_store(bucket: str, tmp_path: Path) -> None:
    """Either way a whole directory, and nothing else is needed."""
    system = fsspec.filesystem("s3")
    here, there = directory_of(tmp_path, 7), directory_of(bucket, 8)
    system.put(str(here.path_of(7)), str(there.path_of(7)), recursive=True)
    assert load(there.path_of(7)) == 7
    assert [entry.problem for entry in there.entries(verify=True)] == [None, None]
    save(there.path_of(7), 7, 7.5)
    assert "manifest.json" not in store.listed(there.path_of(7))  # type: ignore[arg-type]
    assert load(there.path_of(7)) == 7.5
    system.get(str(the_attempt(there.path_of(8))), str(here.path_of(8)), recursive=True)
    assert load(here.latest(verify=True).path) == 8
    system.get(str(there.path_of(8)), str(tmp_path / "all"), recursive=True)
    assert load(find(tmp_path / "all")[0]) == 8


def test_a_url_names_a_checkpoint_or_the_newest_in_it(bucket: str) -> None:
    directory = directory_of(bucket, 1, 2)
    assert find(bucket) == (directory.path_of(2), ())
    assert find(f"{bucket}/step_00000001/")[0] == the_attempt(directory.path_of(1))
    assert find(str(the_attempt(directory.path_of(1))))[0] == the_attempt(directory.path_of(1))
    with pytest.raises(CheckpointError, match=f"There is no sharded checkpoint at {bucket}/7."):
        find(f"{bucket}/7")
    assert CheckpointDirectory(f"{bucket}/step_0000000").latest().path is None, "the beginning of a name"


def test_what_cannot_be_written_is_found_at_the_start(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(url: str) -> str:
        fsspec.filesystem("s3").clear_instance_cache()
        with pytest.raises(
            ConfigurationError, match=rf"^dirpath='{url}' cannot be written to: .* Choose another"
        ) as it:
            CheckpointDirectory(url).prepare()
        return str(it.value)

    assert "The specified bucket does not exist" in refused("s3://nowhere/run")
    trouble("refused", 1)
    assert f"{bucket}/latest.tmp could not be written: PermissionError: Access Denied" in refused(bucket)
    trouble("refused", 1 << 30)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    assert "NoCredentialsError: Unable to locate credentials" in refused(bucket)
    with pytest.raises(CheckpointError, match="could not be listed: NoCredentialsError"):
        CheckpointDirectory(bucket).latest()
    with pytest.raises(CheckpointError, match="could not be looked for: NoCredentialsError"):
        # fsspec says that there is none, and it would be loaded unchecked.
        storage_of(Url(f"{bucket}/last.ckpt")).exists()
    fsspec.filesystem("s3").clear_instance_cache()


def test_an_ordinary_file_is_left_to_lightning(bucket: str) -> None:
    store.write(Url(f"{bucket}/last.ckpt"), b"of DDP")
    assert storage_of(Url(f"{bucket}/last.ckpt")).exists()
    assert not storage_of(Url(f"{bucket}/last.ckpt")).may_be_sharded()
    assert not storage_of(Url("https://example.org/last.ckpt")).may_be_sharded()
    assert not storage_of(Url(f"{bucket}/las")).exists()
    assert storage_of(Url(bucket)).may_be_sharded()
    with pytest.raises(ConfigurationError, match="needs a package that is not installed: Install ossfs"):
        storage_of(Url("oss://bucket/run")).may_be_sharded()


def test_memory_serves_one_process() -> None:
    directory = directory_of("memory://run", 1, 2)
    save(directory.path_of(2), 2, 2.5)
    assert load(directory.latest(verify=True).path) == 2.5
    assert directory.retain(1) == [directory.path_of(1)]
    directory.prepare()
    assert load(find("memory://run")[0]) == 2.5
