"""Bits that flip in a shard: found, named and repaired to the last bit; or the stated error, where nobody can tell."""

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_replica.core.digests import GuardMode
from lightning_replica.core.points import listen
from lightning_replica.sharding.layout import Bucket
from lightning_replica.sharding.shared import Block, SharedMemory
from tests.support import job, world
from tests.support.job import Case, Fault


class ReadByOthers(Callback):
    """Flips a bit of rank 0's shard when rank 0 has gathered it, and the others have not."""

    def __init__(self, out: Path) -> None:
        self.flipped = out / "flipped"

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        strategy = trainer.strategy

        def flip(point: str) -> None:
            if point == "gather" and strategy.state.step == 2 and not self.flipped.exists():
                strategy.state.buffers[0].main.view(torch.uint8).numpy()[1] ^= 1
                self.flipped.touch()

        read = SharedMemory.gather

        def reads_later(memory: SharedMemory, block: Block, bucket: Bucket, params: torch.Tensor) -> None:
            while strategy.state.step == 2 and not self.flipped.exists():
                time.sleep(0.001)
            read(memory, block, bucket, params)

        if trainer.global_rank == 0:
            listen(flip)
        else:
            SharedMemory.gather = reads_later  # type: ignore[method-assign, assignment]


def trains_with_bits_read_by_others(case: Case, out: Path) -> None:
    job.run(case, out, (ReadByOthers(out),))


def flips(*places: tuple[int, str, int]) -> tuple[Fault, ...]:
    return tuple(Fault("corrupt", *place) for place in places)


def assert_repaired(outcome: world.Outcome, case: Case, out: Path, untouched: world.Outcome) -> None:
    outcome.assert_same(untouched)
    assert not outcome.said
    for number, fault in enumerate(case.faults):
        assert (out / f"fired{number}").exists(), f"{fault} was not reached"
        found = rf"rank {fault.rank} is corrupted at step \d+: "
        assert re.search(found, outcome.logs), f"{fault} was not found\n{outcome.logs}"


def found_in(logs: str) -> set[tuple[int, int]]:
    """Which rank's shard was found to be wrong, at which step."""
    found = re.findall(r"^Shard \d of rank (\d) is corrupted at step (\d)", logs, re.MULTILINE)
    return {(int(rank), int(step)) for rank, step in found}


# Ranks 0 and 3 hold different shards, so that both may be wrong at a time.
@pytest.mark.parametrize(("one", "other"), [(0, 3), (3, 0)])
def test_at_rest_anywhere(one: int, other: int, untouched: world.Outcome, tmp_path: Path) -> None:
    faults = flips(
        (one, "forward", 0),
        (other, "validation", 1),
        (one, "before_commit", 1),
        (other, "after_commit", 2),
        (one, "epoch_end", 3),
        (other, "batch_start", 4),
        (one, "train_batch_end", 5),
        (other, "reduction", 5),
        (one, "train_end", 6),
    )
    case = Case(faults=faults)
    outcome = world.run(case, tmp_path)
    assert_repaired(outcome, case, tmp_path, untouched)
    expected = {(one, 0), (other, 1), (one, 1), (other, 2), (one, 3), (other, 4), (one, 5), (other, 5), (one, 6)}
    assert found_in(outcome.logs) == expected


def test_wrong_bits_that_only_others_have_read(tmp_path: Path) -> None:
    """Rank 0's own weights are right, and the shard takes its values from them: no bit of rank 0 is wrong any more."""
    case = Case(accumulate=1)
    untouched = world.run(case, tmp_path / "untouched")
    outcome = world.run(case, tmp_path / "flipped", target=trains_with_bits_read_by_others)
    outcome.assert_same(untouched)
    assert found_in(outcome.logs) == {(0, 2)}


@pytest.mark.combinations
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize(
    "point",
    ["batch_start", "forward", "backward", "reduction", "before_commit", "after_commit", "train_batch_end"],
)
@pytest.mark.parametrize("step", [1, 4, 5])
def test_at_rest(point: str, step: int, rank: int, untouched: world.Outcome, tmp_path: Path) -> None:
    case = Case(faults=flips((rank, point, step)))
    assert_repaired(world.run(case, tmp_path), case, tmp_path, untouched)


@pytest.mark.parametrize(("ranks", "before_validation"), [(3, 6), (4, 5)])
def test_an_update_that_went_wrong_is_named_by_the_majority(ranks: int, before_validation: int, tmp_path: Path) -> None:
    """Also the last one of all; and a validation that has seen its parameters is done again."""
    shape: dict[str, Any] = {"devices": ranks, "replicas": ranks}
    untouched = world.run(Case(**shape), tmp_path / "untouched")
    places = ((0, "update", 0), (ranks - 1, "torn", 1), (1, "gather", 4), (2, "update", before_validation))
    case = Case(faults=flips(*places), **shape)
    outcome = world.run(case, tmp_path / "faults")
    assert_repaired(outcome, case, tmp_path / "faults", untouched)
    assert found_in(outcome.logs) == {(0, 1), (ranks - 1, 2), (1, 4), (2, before_validation + 1)}
    assert outcome.logs.count("an update gave different bits than on its peers") >= 2


def test_an_update_that_went_wrong_with_two_holders(tmp_path: Path) -> None:
    outcome = world.run(Case(faults=flips((2, "update", 2)), devices=4), tmp_path)
    assert outcome.code == 1
    assert not outcome.said
    assert "Shard 0 is lost at step 3: none of its holders (ranks 0, 2) can be trusted." in outcome.logs
    assert "its holders have different bits after an update" in outcome.logs
    assert "Resume from the last checkpoint" in outcome.logs
    assert "recovered" not in outcome.logs


def test_the_holder_that_is_left_is_not_right(tmp_path: Path) -> None:
    """Nobody takes wrong bits from it."""
    faults = (*flips((3, "forward", 2)), Fault("kill", 1, "reduction", 2))
    outcome = world.run(Case(faults=faults), tmp_path)
    assert outcome.code != 0
    assert "Shard 1 is lost at step 2: none of its holders (ranks 1, 3) can be trusted." in outcome.logs
    assert "Shard 1 of rank 3 is corrupted at step 2: its memory changed at rest" in outcome.logs


def test_together_with_other_faults(untouched: world.Outcome, tmp_path: Path) -> None:
    """A rank dies and a holder of another shard has flipped: before the commit, after it, and while recovering."""
    faults = (
        *flips((0, "forward", 1)),
        Fault("kill", 1, "backward", 1),
        *flips((3, "before_commit", 3)),
        Fault("kill", 2, "batch_start", 4),
        Fault("exception", 1, "forward", 5),
        *flips((2, "rollback", 5)),
    )
    outcome = world.run(Case(faults=faults), tmp_path)
    outcome.assert_same(untouched)
    assert found_in(outcome.logs) >= {(3, 3), (2, 5)}
    assert {rank for rank, _ in found_in(outcome.logs)} == {0, 2, 3}


def test_a_part_at_a_time(tmp_path: Path) -> None:
    """What "sampled" misses at first it finds when its turn comes; "off" finds nothing."""
    guards: list[tuple[GuardMode, bool, int]] = [("off", False, 1), ("sampled", True, 9)]
    for guard, found, epochs in guards:
        case = Case(flips((0, "forward", 1)), devices=3, replicas=3, accumulate=1, epochs=epochs, guard=guard)
        outcome = world.run(case, tmp_path / guard)
        assert outcome.code == 0, outcome.logs
        assert ("Shard 0 of rank 0 is corrupted" in outcome.logs) == found, outcome.logs
        mains = {rank["main"] for rank in outcome.ranks}
        assert len(mains) == (1 if found else 2)
