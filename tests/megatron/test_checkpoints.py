"""Checkpoints of models that are divided among ranks."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_replica.cli.main import main
from tests.megatron import job
from tests.megatron.test_faults import make
from tests.support import world
from tests.support.job import Fault
from tests.support.world import Outcome


def assert_ends_as(resumed: Outcome, untouched: Outcome) -> None:
    """Lists of the module begin anew, as attributes are not in checkpoints; the rest is the same."""
    for ours, whole in zip(resumed.ranks, untouched.ranks, strict=True):
        for name in ("norms", "zeros", "scales"):
            ours, whole = dict(ours), dict(whole)
            found, expected = ours.pop(name), whole.pop(name)
            assert found == expected[len(expected) - len(found) :]
        assert ours == whole


@pytest.mark.parametrize("name", ["tp", "pp", "ep", "vpp", "fp16"])
def test_a_run_that_resumes_ends_with_the_bits_of_the_untouched_run(tmp_path: Path, name: str) -> None:
    case = make(name)
    untouched = world.run(case, tmp_path / "untouched", target=job.run)
    assert untouched.code == 0, untouched.logs
    saved = tmp_path / "untouched" / "checkpoints" / "step=2.ckpt"
    manifest = json.loads((saved / "manifest.json").read_text())
    assert (manifest["world_size"], manifest["replicas"]) == (4, 2)
    resumed = world.run(replace(case, load=str(saved)), tmp_path / "resumed", target=job.run)
    assert resumed.code == 0, resumed.logs
    assert_ends_as(resumed, untouched)


@pytest.mark.parametrize("name", ["pp", "ep"])
def test_a_last_checkpoint_of_survivors(tmp_path: Path, name: str) -> None:
    """A rank dies with no restart left. The others write what it held, and a later run goes on from there."""
    untouched = world.run(make(name), tmp_path / "untouched", target=job.run)
    case = replace(make(name, Fault("kill", 3, "update", 2)), gasp=True)
    lost = world.run(case, tmp_path / "lost", max_restarts=0, target=job.run)
    assert lost.code == 75, lost.logs
    (saved,) = (tmp_path / "lost" / "gasp").glob("step_*")
    resumed = world.run(replace(make(name), load=str(saved)), tmp_path / "resumed", target=job.run)
    assert resumed.code == 0, resumed.logs
    assert_ends_as(resumed, untouched)


def test_training_goes_on_in_other_sizes(tmp_path: Path) -> None:
    """From the same sample on, with the same norms but for the order of sums. Dropout is off: its masks are ranks'."""
    case = replace(make("tp"), plain=True)
    whole = world.run(case, tmp_path / "saved", target=job.run)
    assert whole.code == 0, whole.logs
    saved = str(tmp_path / "saved" / "checkpoints" / "step=2.ckpt")
    for name in ("one", "pp"):
        other = replace(make(name), plain=True, load=saved)
        resumed = world.run(other, tmp_path / name, target=job.run)
        assert resumed.code == 0, resumed.logs
        assert [rank["progress"] for rank in resumed.ranks] == [whole.ranks[0]["progress"]] * other.devices
        for rank in resumed.ranks:
            assert rank["norms"] == pytest.approx(whole.ranks[0]["norms"][-len(rank["norms"]) :], rel=1e-5)


def test_validation_in_other_sizes(tmp_path: Path) -> None:
    case = make("tp")
    assert world.run(case, tmp_path / "saved", target=job.run).code == 0
    saved = str(tmp_path / "saved" / "checkpoints" / "step=4.ckpt")
    losses = []
    for name in ("tp", "pp"):
        other = replace(make(name), load=saved, validate=True)
        found = world.run(other, tmp_path / name, target=job.run)
        assert found.code == 0, found.logs
        losses.append(sorted({rank["val"] for rank in found.ranks}))
    assert len(losses[0]) == 2  # each half of the ranks has other data
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("name", ["tp", "ep"])
def test_a_run_starts_from_what_megatron_core_would_read(tmp_path: Path, name: str) -> None:
    """By way of megatron-core's form of a checkpoint, and back: the same weights, in any sizes; steps count from 0."""
    case = replace(make(name), plain=True)
    assert world.run(case, tmp_path / "untouched", target=job.run).code == 0
    saved, exported, imported = tmp_path / "untouched/checkpoints/step=4.ckpt", tmp_path / "theirs", tmp_path / "ours"
    assert main(["export", "--format", "megatron", str(saved), str(exported)]) == 0
    assert main(["import", str(exported), str(imported)]) == 0
    (found,) = imported.glob("step_*")
    validated = [
        world.run(replace(case, load=str(path), validate=True), tmp_path / path.name, target=job.run).ranks
        for path in (saved, found)
    ]
    assert validated[0] == validated[1]
    norms = []
    for number, other in enumerate((case, replace(case, tensor=1, expert=1, experts=name == "ep", devices=2))):
        run = world.run(replace(other, load=str(found)), tmp_path / f"fit{number}", target=job.run)
        assert run.code == 0, run.logs
        assert run.ranks[0]["progress"][0] == 4
        norms.append(run.ranks[0]["norms"])
    if name == "tp":  # with experts, four ranks read other batches than two
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
