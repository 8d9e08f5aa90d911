"""A model of megatron-core that is not divided trains to the same bits under both strategies."""

from dataclasses import replace
from pathlib import Path

from tests.megatron import job
from tests.megatron.job import Case
from tests.support import world


def test_the_same_bits(tmp_path: Path) -> None:
    divided = Case(devices=2, accumulate=2, epochs=2, plain=True, micro=None, hooks=True)
    ours = world.run(divided, tmp_path / "megatron", target=job.run)
    bare = world.run(replace(divided, bare=True), tmp_path / "bare", target=job.run)
    assert ours.code == bare.code == 0, ours.logs + bare.logs
    for name in ("values", "main", "optimizer", "norms", "calls"):
        assert [rank[name] for rank in ours.ranks] == [rank[name] for rank in bare.ranks], name
