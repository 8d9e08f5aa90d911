"""What the exploration (recovery/test_exploration.py) has found and nobody had thought of, with real processes.

In each story the private state of a rank has not arrived at some peer when a window is cut short; then, once another
rank has gone back to a snapshot, one that has not is killed. Each was seen to fail with its fix taken out.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_replica import RecoveryCallback
from lightning_replica.core.digests import Digest
from lightning_replica.core.plain import Pieces
from lightning_replica.core.recoverable import Kind
from lightning_replica.recovery.mirror import Mirrors
from tests.support import job, world
from tests.support.doubles import overriding
from tests.support.job import Case, Fault

STEP = 2
BACK = "somebody is back"  # key in the store


@dataclass
class Story(Case):
    """Two faults, at "met" and at "regrouped".

    ``lost`` has what does not arrive: (at whom, of whom). ``back`` is who goes back before the second fault comes.
    """

    lost: tuple[tuple[int, int], ...] = ()
    back: int = -1


@overriding(new=("reach", "to_come"))
class Acts(RecoveryCallback):
    """Writes to weights in the tail of every step, meets in collectives, and strikes."""

    def __init__(self, case: Story, out: Path) -> None:
        self.case, self.out, self.rank = case, out, int(os.environ["LOCAL_RANK"])

    def reach(self, number: int, point: str) -> None:
        self.case.faults[number].reach(point, STEP, self.out / f"fired{number}")

    def to_come(self, number: int) -> bool:
        return bool(self.case.faults) and not (self.out / f"fired{number}").exists()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2:
            with torch.no_grad():
                for parameter in filter(lambda p: p.requires_grad, pl_module.parameters()):
                    parameter.mul_(0.99)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == STEP and self.to_come(0):
            dist.barrier()  # whoever is here has settled its mirrors
            self.reach(0, "met")

    def on_recovery_regroup(self, trainer: Any, pl_module: Any, context: Any) -> None:
        second = self.case.faults[1]
        if self.rank == second.rank and self.to_come(1):
            trainer.strategy.session.world.generations.store.wait([BACK])
            self.reach(1, "regrouped")

    def on_recovery_repair(self, trainer: Any, pl_module: Any, context: Any) -> None:
        if self.rank == self.case.back:
            trainer.strategy.session.world.generations.store.set(BACK, "")
        dist.barrier()  # nobody mirrors anything before the second fault has come


def train(case: Story, out: Path) -> None:
    acts, begin = Acts(case, out), Mirrors.begin

    def begin_and_lose(self: Mirrors, kind: Kind, step: int, payload: Pieces, digest: Digest | None = None) -> None:
        begin(self, kind, step, payload, digest)
        if (kind, step) == ("batch", STEP) and acts.to_come(0):
            self.settle()
            for at, of in case.lost:
                if at == acts.rank:
                    self._rows[kind, step][-1][self._peers.index(of)] = None

    Mirrors.begin = begin_and_lose  # type: ignore[method-assign]
    job.run(case, out, (acts,))


def three(*faults: Fault, lost: tuple[tuple[int, int], ...], back: int) -> Story:
    return Story(faults, replicas=3, devices=3, epochs=1, lost=lost, back=back)


STORIES = {
    # The window is chosen although rank 0 has nobody's state, and the tail given up for it; after the second fault the
    # window is no good any more. With `any` for `all` in `planner._is_mirrored`, and always "tail" in the last line of
    # `_kind`, the run ends; with the first alone the window is chosen.
    "a tail that was given up": three(
        Fault("exception", 0, "met", STEP), Fault("kill", 1, "regrouped", STEP), lost=((0, 1), (0, 2)), back=0
    ),
    # The state of the lost rank is with one peer only, which is lost next. With `any` for `all` in `_is_mirrored`.
    "one holder would not do": three(
        Fault("kill", 0, "met", STEP), Fault("kill", 2, "regrouped", STEP), lost=((1, 0),), back=1
    ),
    # The shard is back in the tail, without what the hook has written to weights; then all would go on from the window,
    # in which it counts. With `restore_groups` keeping all snapshots, as `restore` dropped them before.
    "another snapshot than the shard's": Story(
        (Fault("exception", 0, "met", STEP), Fault("kill", 0, "regrouped", STEP)),
        devices=2,
        epochs=1,
        lost=((0, 1),),
        back=1,
    ),
}


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> dict[int, world.Outcome]:
    """By number of ranks, which all have the same shard."""
    return {
        ranks: world.run(
            Story(replicas=ranks, devices=ranks, epochs=1), tmp_path_factory.mktemp("untouched"), target=train
        )
        for ranks in (2, 3)
    }


@pytest.mark.parametrize("name", STORIES)
def test_story(name: str, oracles: dict[int, world.Outcome], tmp_path: Path) -> None:
    story = STORIES[name]
    outcome = world.run(story, tmp_path, target=train)
    outcome.assert_same(oracles[story.devices])
    assert all((tmp_path / f"fired{number}").exists() for number in range(2)), "not reached"
    assert outcome.logs.count(f"recovered at step {STEP}") == 1
    assert "the tail of the step is done again" in outcome.logs
