"""Manifests and contents that say what cannot be, with checksums that are right: whole ones beside them are found."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_replica.checkpoint import store
from lightning_replica.checkpoint.attempts import attempts_at
from lightning_replica.checkpoint.directory import CheckpointDirectory
from lightning_replica.cli.main import main
from tests.checkpoint.rewrite import as_bytes, change, rewrite, sealed
from tests.checkpoint.small import directory_of, load
from tests.support.typed import in_store, on_disk

DEEP = 10_000


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> CheckpointDirectory:
    """Of steps 1, 2 and 9; tests change the manifest of the last, and nothing else."""
    return directory_of(tmp_path_factory.mktemp("three"), 1, 2, 9)


def places(plain: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of everything in a manifest."""
    yield place
    for key in plain if isinstance(plain, dict) else ():
        yield from places(plain[key], (*place, key))


def put(plain: Any, place: tuple[Any, ...], value: Any) -> Any:
    """The same with something else in one place."""
    return {**plain, place[0]: put(plain[place[0]], place[1:], value)} if place else value


STRANGE = st.one_of(
    st.sampled_from([-1, -(2**63), 2**31, 2**63, 2**64, 10**400, 1e308, float("inf"), float("nan"), -0.0, 9.0]),
    st.sampled_from([None, True, False, [], {}, [[]], "9", "", "../step_00000001", "\ud800", "a\x00b", "\x1b[2J"]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=8,
    ),
)


@st.composite
def manifests(draw: st.DrawFn, original: str) -> str:
    """Something else in one place, mostly; or a key more, or one less; or something said twice, or too deep."""
    plain = json.loads(original)
    everywhere = [place for place in places(plain) if place and place[0] not in ("crc32", "format")]
    what = draw(st.sampled_from(["other"] * 12 + ["more", "less", "twice", "deep", "no checksum", "format"]))
    for _ in range(draw(st.sampled_from([1, 1, 1, 2]))):
        shallow = [place for place in everywhere if len(place) == 1]
        plain = put(plain, draw(st.sampled_from(shallow * 3 + everywhere)), draw(STRANGE))
        everywhere = [place for place in places(plain) if place]
    if what == "more":
        plain[draw(st.text(max_size=5))] = draw(STRANGE)
    elif what == "less":
        plain.pop(draw(st.sampled_from(sorted(plain))))
    elif what == "format":
        plain["format"] = draw(STRANGE)
    text = sealed(plain)
    if what == "twice":
        text = text[:-1] + ', "step": 9}'
    elif what == "deep":
        text = text.replace('"saved_ns":', '"step": ' + "[" * DEEP + "]" * DEEP + ', "saved_ns":', 1)
    return json.dumps({**plain, "crc32": draw(STRANGE)}) if what == "no checksum" else text


def check(directory: CheckpointDirectory, capsys: Any) -> None:
    """The one of step 2 is found, unless the changed one is whole all the same; nothing is lost on the way."""
    latest = directory.latest(verify=True)
    assert latest.path in (directory.path_of(2), directory.path_of(9))
    assert load(latest.path) == int(latest.path.name.removeprefix("step_"))
    assert len(list(directory.entries(verify=True))) == 3
    assert main(["inspect", str(directory.path), "--verify"]) in (0, 1)
    capsys.readouterr().out.encode()  # what is shown can be shown


def test_a_mutated_manifest_hides_nothing(three: CheckpointDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    file = on_disk(three.path_of(9)) / "manifest.json"
    original = file.read_text()

    @settings(max_examples=60, derandomize=True, database=None)
    @given(manifests(original))
    def mutated(text: str) -> None:
        file.write_text(text)
        check(three, capsys)

    mutated()
    file.write_text(original)
    assert three.latest(verify=True).path == three.path_of(9)


# As they were found; and what each of them would have done.
KNOWN: dict[str, Any] = {
    "a step that is text": {"step": "9"},
    "a step without end": {"step": float("inf")},
    "no time": {"saved_ns": None},
    "a time after all times": {"saved_ns": 10**30},
    "a step that is true": {"step": True},
    "no files": {"files": []},
    "a file of another size than any": {"files": {"plain.pt": {"size_bytes": -1, "crc32": 0}}},
    "a host that clears the screen": {"writers": {"0": "\x1b[2J"}},
}


@pytest.mark.parametrize("known", KNOWN)
def test_a_manifest_of_wrong_types_is_said_to_be_one(known: str, three: CheckpointDirectory) -> None:
    file = on_disk(three.path_of(9)) / "manifest.json"
    original = file.read_text()
    try:
        file.write_text(sealed({**json.loads(original), **KNOWN[known]}))
        latest = three.latest()
    finally:
        file.write_text(original)
    assert latest.path == three.path_of(2)
    assert f"The checkpoint {three.path_of(9)} cannot be used: its manifest.json cannot be read" in latest.problems[0]


def test_in_a_store(bucket: str) -> None:
    directory = directory_of(bucket, 1, 2)
    (attempt,) = attempts_at(in_store(directory.path_of(2)))
    original = store.read(attempt.url / "manifest.json")
    assert original is not None
    for content in ({"step": "9"}, {"saved_ns": None}):
        store.write(attempt.url / "manifest.json", sealed({**json.loads(original), **content}).encode())
        assert directory.latest(verify=True).path == directory.path_of(1)
    store.write(attempt.url / "manifest.json", b"[" * DEEP)
    assert directory.latest(verify=True).path == directory.path_of(1)


def _stride_0(contents: dict[str, Any]) -> None:
    contents["weights"]["first.weight"]["stride"] = (0, 1)


def _negative(contents: dict[str, Any]) -> None:
    contents["weights"]["first.weight"]["shape"] = (-7, -20)


def _holes(contents: dict[str, Any]) -> None:
    contents["weights"]["first.weight"]["stride"] = (40, 2)


def _no_stride(contents: dict[str, Any]) -> None:
    del contents["weights"]["first.weight"]["stride"]


CANNOT_BE = "contents.pt holds impossible values"
WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "stride 0": (lambda p: change(p, "contents.pt", _stride_0), f"{CANNOT_BE} .*overlaps or has holes"),
    "negative": (lambda p: change(p, "contents.pt", _negative), f"{CANNOT_BE} .*a tensor cannot have shape"),
    "holes": (lambda p: change(p, "contents.pt", _holes), f"{CANNOT_BE} .*overlaps or has holes"),
    "no stride": (lambda p: change(p, "contents.pt", _no_stride), f"{CANNOT_BE} .*stride"),
    "no contents": (lambda p: rewrite(p, "contents.pt", b"none"), "contents.pt cannot be loaded"),
    "no plain data": (lambda p: rewrite(p, "plain.pt", b"none"), "plain.pt cannot be loaded"),
    "a plain list": (lambda p: rewrite(p, "plain.pt", as_bytes([1])), "plain.pt holds a list"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_loaded_is_not_whole(wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = directory_of(tmp_path, 1, 2)
    do, said = WRONG[wrong]
    do(on_disk(directory.path_of(2)))
    latest = directory.latest(verify=True)
    assert latest.path == directory.path_of(1)
    assert re.search(rf"The checkpoint {directory.path_of(2)} cannot be used: {said}", latest.problems[0])
    assert main(["inspect", str(directory.path_of(2)), "--verify"]) == 1
    assert re.search(said, capsys.readouterr().out)
