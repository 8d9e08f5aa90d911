"""What a user gives for a place is a path or a URL, and stays one."""

from pathlib import Path

import pytest

from lightning_replica import CheckpointPublisher, ConfigurationError, DyingGaspCheckpoint
from lightning_replica.checkpoint.location import absolute, locate


@pytest.mark.parametrize(
    "given", ["s3://bucket/run", "s3://bucket/run/", "gs://a", "abfs://c@account.host/x", "memory://x"]
)
def test_a_url_keeps_its_slashes(given: str) -> None:
    url = locate(given)
    assert str(url) == given.rstrip("/")
    assert locate(url) is url
    assert absolute(given) == url
    assert str(url / "step_1") == f"{given.rstrip('/')}/step_1"
    assert ((url / "step_1").name, (url / "step_1").parent) == ("step_1", url)


def test_everything_else_is_a_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    expected_of: dict[str | Path, Path] = {
        "run": Path("run"),
        "/a/b/": Path("/a/b"),
        Path("a"): Path("a"),
        "file:///a/b": Path("/a/b"),
        "local:///a": Path("/a"),
        "epoch=1:/x": Path("epoch=1:/x"),
    }
    for given, expected in expected_of.items():
        assert locate(given) == expected
        assert absolute(given) == tmp_path / expected


def test_home_is_where_lightning_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate("~/run") == locate(Path("~/run")) == tmp_path / "run"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Path("s3://bucket/run"), r"PosixPath\('s3:/bucket/run'\) was a URL before it became a Path.*as a string"),
        ("simplecache::s3://bucket/run", "'simplecache::s3://bucket/run' leads through several file systems"),
        ("zip://a::s3://bucket/b.zip", "leads through several file systems"),
        ("s3://", "'s3://' is not the URL of a directory. Name one, such as 's3://bucket/run'"),
        ("s3://bucket/run-*", "is not the URL of a directory"),
        (
            "nothing://bucket/run",
            r"nothing://bucket/run cannot be reached: Protocol not known: nothing.*available_proto",
        ),
        ("oss://bucket/run", r"oss://bucket/run needs a package that is not installed: .*Install ossfs"),
    ],
)
def test_what_cannot_be_is_refused_before_a_fit(given: str | Path, message: str) -> None:
    for callback in (DyingGaspCheckpoint, CheckpointPublisher):
        with pytest.raises(ConfigurationError, match=message):
            callback(given)
