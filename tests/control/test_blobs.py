"""Large values: on several nodes, a replacement reads them on a machine that has none of the files."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_replica.control import blobs
from lightning_replica.control.blobs import Blobs
from lightning_replica.errors import RecoveryError

DATA = bytes(range(256)) * 10_000  # in three pieces


def machines(tmp_path: Path, store: Any) -> tuple[Blobs, Blobs]:
    places = tmp_path / "one", tmp_path / "other"
    for place in places:
        place.mkdir()
    return Blobs(places[0], store), Blobs(places[1], store)


def test_a_value_is_read_where_its_file_is_not(tmp_path: Path) -> None:
    one, other = machines(tmp_path, dist.HashStore())
    one.put("a", DATA, by=0)
    assert one.get("a") == other.get("a") == DATA
    one.put("a", b"no second time", by=1)
    assert (tmp_path / "one" / "a").read_bytes() == DATA
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["a"]


def test_a_value_that_is_too_large_for_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "MOST_BYTES", 100)
    one, other = machines(tmp_path, dist.HashStore())
    one.put("a", DATA, by=0)
    assert one.get("a") == DATA
    with pytest.raises(RecoveryError, match="it is on another node only"):
        other.get("a")


def test_one_machine_needs_no_store(tmp_path: Path) -> None:
    one, other = machines(tmp_path, None)
    one.put("a", memoryview(DATA), by=0)
    assert one.get("a") == DATA
    with pytest.raises(RecoveryError, match="No such file"):
        other.get("a")
