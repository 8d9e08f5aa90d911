"""What listens, listens on loopback only."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lightning_replica.stores.tcp import listen, serve
from tests.support import job, world
from tests.support.job import Case

LOOPBACK = ("0100007F", "0" * 8 + "0" * 16 + "01000000")
LISTEN = "0A"


def listening() -> list[str]:
    """The addresses on which this process listens, as the kernel writes them."""
    links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    own = {os.readlink(link)[len("socket:[") : -1] for link in links if os.path.islink(link)}
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path("/proc/net", name).read_text().splitlines()[1:]]
    return [row[1].split(":")[0] for row in rows if row[3] == LISTEN and row[9] in own]


class Listens(job.Model):
    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        out = self._faults[0].out / f"listening{self.global_rank}"
        out.write_text(json.dumps(listening()))
        return super().training_step(batch, batch_idx)


def train(case: Case, out: Path) -> None:
    job.Model = Listens  # type: ignore[misc]
    job.run(case, out)


def test_the_store() -> None:
    before = Counter(listening())  # of earlier tests; some of it may be closed at any time
    store = serve("127.0.0.1")
    assert store.port > 0
    assert [*(Counter(listening()) - before).elements()] == [LOOPBACK[0]]


def test_ranks(tmp_path: Path) -> None:
    outcome = world.run(Case(devices=2, epochs=1), tmp_path, target=train)
    assert outcome.code == 0, outcome.logs
    for rank in range(2):
        found = json.loads((tmp_path / f"listening{rank}").read_text())
        assert found, "gloo listens"
        assert set(found) <= set(LOOPBACK)


def test_two_that_are_about_to_serve_at_one_port() -> None:
    """The second fails at once, and so knows that the first serves; two that are only bound would both go on."""
    with listen("127.0.0.1") as first, pytest.raises(OSError, match="in use"):
        listen("127.0.0.1", first.getsockname()[1])
