"""Checkpoints of models that torch's tensor parallelism divides."""

import json
from pathlib import Path
from typing import Any

import lightning as L
import torch

from tests.support import world
from tests.support.job import Fault
from tests.support.world import Outcome
from tests.tensor_parallel import job
from tests.tensor_parallel.job import make


def without_history(outcome: Outcome) -> list[dict[str, Any]]:
    """Without the norms of steps, of which a checkpoint has none."""
    assert outcome.code == 0, outcome.logs
    return [{name: value for name, value in rank.items() if name != "norms"} for rank in outcome.ranks]


def test_a_run_that_resumes_ends_with_the_bits_of_the_untouched_run(
    untouched: Outcome, saved: Path, tmp_path: Path
) -> None:
    manifest = json.loads((saved / "manifest.json").read_text())
    assert (manifest["world_size"], manifest["replicas"]) == (4, 2)
    resumed = world.run(make(load=str(saved)), tmp_path, target=job.run)
    assert without_history(resumed) == without_history(untouched)


def test_a_last_checkpoint_of_survivors(untouched: Outcome, tmp_path: Path) -> None:
    """A rank dies with no restart left. The others write what it held, and a later run goes on from there."""
    case = make(Fault("kill", 3, "update", 2), gasp=True)
    lost = world.run(case, tmp_path / "lost", max_restarts=0, target=job.run)
    assert lost.code == 75, lost.logs
    (saved,) = (tmp_path / "lost" / "gasp").glob("step_*")
    resumed = world.run(make(load=str(saved)), tmp_path / "resumed", target=job.run)
    assert without_history(resumed) == without_history(untouched)


def test_a_validation_reads_the_part_of_each_rank(untouched: Outcome, saved: Path, tmp_path: Path) -> None:
    last = saved.with_name("step=4.ckpt")
    outcome = world.run(make(load=str(last)), tmp_path, target=job.validate)
    assert outcome.code == 0, outcome.logs
    assert [rank["trained"] for rank in outcome.ranks] == [rank["trained"] for rank in untouched.ranks]
    assert all("cannot be written outside of a fit: no rank has all" in rank["error"] for rank in outcome.ranks)


def test_other_sizes_and_whole_weights_are_refused(saved: Path, tmp_path: Path) -> None:
    refused = world.run(make(tensor=1, load=str(saved)), tmp_path / "whole", target=job.run)
    assert "The checkpoint is of another model" in refused.logs
    full = tmp_path / "full.ckpt"
    torch.save({"state_dict": {"last.bias": torch.zeros(1)}, "pytorch-lightning_version": L.__version__}, full)
    refused = world.run(make(load=str(full)), tmp_path / "divided", target=job.run)
    assert refused.code == 1
    assert f"{full} holds whole weights, not those of tensor ranks" in refused.logs
