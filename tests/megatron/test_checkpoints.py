"""Checkpoints of models that are divided among ranks."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.megatron import job
from tests.megatron.test_faults import make
from tests.support import world
from tests.support.job import Fault


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_a_run_that_resumes_ends_with_the_bits_of_the_untouched_run(tmp_path: Path, sizes: tuple[int, int]) -> None:
    case = make(sizes)
    untouched = world.run(case, tmp_path / "untouched", target=job.run)
    assert untouched.code == 0, untouched.logs
    saved = tmp_path / "untouched" / "checkpoints" / "step=2.ckpt"
    manifest = json.loads((saved / "manifest.json").read_text())
    assert (manifest["world_size"], manifest["replicas"]) == (4, 2)
    resumed = world.run(replace(case, load=str(saved)), tmp_path / "resumed", target=job.run)
    assert resumed.code == 0, resumed.logs
    assert resumed.ranks == untouched.ranks


def test_a_last_checkpoint_of_survivors(tmp_path: Path) -> None:
    """A rank dies with no restart left. The others write what it held, and a later run goes on from there."""
    untouched = world.run(make((1, 2)), tmp_path / "untouched", target=job.run)
    case = replace(make((1, 2), Fault("kill", 3, "update", 2)), gasp=True)
    lost = world.run(case, tmp_path / "lost", max_restarts=0, target=job.run)
    assert lost.code == 75, lost.logs
    (saved,) = (tmp_path / "lost" / "gasp").glob("step_*")
    resumed = world.run(replace(make((1, 2)), load=str(saved)), tmp_path / "resumed", target=job.run)
    assert resumed.ranks == untouched.ranks, resumed.logs


def test_a_checkpoint_of_other_sizes_is_refused(tmp_path: Path) -> None:
    case = make((2, 1))
    assert world.run(case, tmp_path / "saved", target=job.run).code == 0
    saved = tmp_path / "saved" / "checkpoints" / "step=2.ckpt"
    refused = world.run(replace(make((1, 2)), load=str(saved)), tmp_path / "refused", target=job.run)
    assert refused.code == 1
    assert "The checkpoint is of another model" in refused.logs
