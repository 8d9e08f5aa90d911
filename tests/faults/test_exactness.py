"""A recovery that is not exact says so itself, although no snapshot knows of the state that it loses."""

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_replica import RecoveryReport
from tests.support import job, world
from tests.support.job import Case, Fault

hidden: Any = torch
hidden.test_exactness = itertools.count(1)  # state that no snapshot reaches: in a module of an installed package


class ChangesData(Callback):
    """Makes the loss depend on the hidden state."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        batch[0].mul_(1 + next(hidden.test_exactness) / 100)


class ChangesGradients(Callback):
    """Makes the gradient depend on the hidden state, after the loss is known."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1 + next(hidden.test_exactness) / 100)


class RefersToAnother(Callback):
    """Refers to one parameter, and in a replacement to another."""

    def __init__(self) -> None:
        self.parameters: list[torch.nn.Parameter] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        born = os.environ["LIGHTNING_REPLICA_GENERATION"] != "0"
        self.parameters = [pl_module.last.bias if born else pl_module.first.bias]


class BuildsByRank(Callback):
    """Has objects that are others on rank 0, or missing elsewhere, as code after `is_global_zero` makes them."""

    changed = False  # whether a replacement makes others than its predecessor

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        zero, born = trainer.is_global_zero, os.environ["LIGHTNING_REPLICA_GENERATION"] != "0"
        self.rows: list[int] | None = [] if zero else None
        self.random = torch.Generator() if zero else None
        self.parameter = pl_module.last.bias if zero and not (born and self.changed) else pl_module.first.bias
        self.alone = [torch.distributed.new_group([rank]) for rank in range(4)]
        if trainer.global_rank == 2:
            self.last = {"rows": [1.0]}
        if zero:
            pl_module.first.register_forward_hook(_look)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.rows is not None:
            self.rows.append(batch_idx)


class BuildsOtherwiseLater(BuildsByRank):
    """Refers to something else in the replacement of rank 0, where no other rank refers to what rank 0 does."""

    changed = True


def _look(module: Any, args: Any, output: Any) -> None:
    """Change nothing."""


class Hidden(Case):
    """A training with one of these callbacks."""

    callback: type[Callback] = Callback
    on_inexact = "report"


def train(case: Hidden, out: Path) -> None:
    job.run(case, out, (case.callback(), RecoveryReport(out / "recovery.jsonl")), on_inexact=case.on_inexact)


def run(out: Path, callback: type[Callback], *faults: Fault, **options: Any) -> world.Outcome:
    case = Hidden(faults, guard="sampled", **options)
    case.callback = callback
    return world.run(case, out, target=train)


def inexact(out: Path) -> list[dict[str, str]]:
    return [json.loads(line)["inexact"] for line in (out / "recovery.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("fault", [Fault("exception", 0, "backward", 2), Fault("kill", 0, "backward", 2)])
def test_a_batch_that_is_done_again_with_another_loss(fault: Fault, tmp_path: Path) -> None:
    outcome = run(tmp_path, ChangesData, fault, Fault("exception", 3, "train_batch_end", 4))
    assert outcome.code == 0, outcome.logs
    first, second = inexact(tmp_path)
    ranks = {f"the loss of step 3 on rank {rank}" for rank in range(4)}
    assert first
    assert first.keys() <= ranks - ({"the loss of step 3 on rank 0"} if fault.kind == "kill" else set())
    assert all(
        "when the batch was done again: something that is not restored affects it" in each for each in first.values()
    )
    assert second == {}  # a tail that is done again has no loss, and what has been told is past
    (told,) = [line for line in outcome.logs.splitlines() if "NOT EXACT" in line]
    assert "recovered at step 2" in told


def test_a_batch_that_is_done_again_with_another_gradient(tmp_path: Path) -> None:
    outcome = run(tmp_path, ChangesGradients, Fault("exception", 1, "before_commit", 2))
    assert outcome.code == 0, outcome.logs
    (found,) = inexact(tmp_path)
    assert found
    assert found.keys() <= {f"the gradient of step 3 on rank {rank}" for rank in (0, 2, 3)}


def test_a_replacement_that_refers_to_another_object(tmp_path: Path) -> None:
    outcome = run(tmp_path, RefersToAnother, Fault("kill", 2, "backward", 2), Fault("exception", 1, "backward", 4))
    assert outcome.code == 0, outcome.logs
    first, second = inexact(tmp_path)
    why = "in this replacement it refers to something else than on the other ranks"
    assert list(first.values()) == [why]
    assert next(iter(first)).endswith("(RefersToAnother).parameters")
    assert second == {}


def test_ranks_may_be_built_differently_from_the_start(tmp_path: Path) -> None:
    faults = [
        Fault("kill", rank, "backward", step) for rank, step in ((0, 2), (2, 3), (0, 4))
    ]  # 0 and 2 hold one shard
    outcome = run(tmp_path, BuildsByRank, *faults)
    assert outcome.code == 0, outcome.logs
    assert inexact(tmp_path) == [{}] * 3, outcome.logs


def test_a_replacement_is_compared_with_its_predecessor(tmp_path: Path) -> None:
    outcome = run(tmp_path, BuildsOtherwiseLater, Fault("kill", 0, "backward", 2), Fault("kill", 3, "backward", 4))
    assert outcome.code == 0, outcome.logs
    first, second = inexact(tmp_path)
    assert [name.rpartition(".")[2] for name in first] == ["parameter"]
    assert second == {}


def test_the_run_ends_if_the_user_wants_that(tmp_path: Path) -> None:
    fault = Fault("exception", 0, "backward", 2)
    case = Hidden((fault,), gasp=True)
    case.callback, case.on_inexact = ChangesData, "raise"
    outcome = world.run(case, tmp_path, target=train)
    assert outcome.code != 0
    assert 'The recovery at step 2 is not exact (`on_inexact="raise"`): the loss of step 3' in outcome.logs
    assert not list((tmp_path / "gasp").glob("step_*"))
    (found,) = inexact(tmp_path)[:1]
    assert all(name.startswith("the loss of step 3 on rank") for name in found)


def test_the_run_ends_if_one_rank_alone_finds_it(tmp_path: Path) -> None:
    case = Hidden((Fault("kill", 2, "backward", 2),))
    case.callback, case.on_inexact = RefersToAnother, "raise"
    outcome = world.run(case, tmp_path, target=train)
    assert outcome.code != 0
    problem = "in this replacement it refers to something else than on the other ranks"
    assert any(
        'is not exact (`on_inexact="raise"`)' in text and problem in text for text in (outcome.logs, *outcome.said)
    )
    assert all(rank == {} for rank in outcome.ranks)


def test_nothing_is_said_of_what_is_exact(tmp_path: Path) -> None:
    fault = Fault("exception", 1, "before_commit", 2)
    outcome = world.run(Hidden((fault,)), tmp_path / "fault", target=train)
    outcome.assert_same(world.run(Hidden(), tmp_path / "untouched", target=train))
    assert inexact(tmp_path / "fault") == [{}]


class Registers(Callback):
    """Registers a hook in the middle of training, which a replacement has not seen."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 1 and not pl_module.first._forward_hooks:
            pl_module.first.register_forward_hook(halved)


def halved(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output / 2


def test_a_hook_that_a_replacement_lacks(tmp_path: Path) -> None:
    outcome = run(tmp_path, Registers, Fault("kill", 1, "forward", 3))
    assert outcome.code == 0, outcome.logs
    (found,) = inexact(tmp_path)
    why = "in this replacement there are other ones (none) than on other ranks (tests.faults.test_exactness.halved)"
    assert [name.partition(" on ")[0] for name, said in found.items() if said == why] == ["hooks of first"], found


class RegistersAnew(Callback):
    """Registers a hook in one step, without a look at what is there, and removes it in another."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3:
            self.handle = pl_module.first.register_forward_hook(halved)
        if trainer.global_step == 4:
            self.handle.remove()


@pytest.mark.parametrize("step", [3, 4])
def test_a_hook_that_is_registered_again(step: int, tmp_path: Path) -> None:
    untouched = run(tmp_path / "untouched", RegistersAnew)
    outcome = run(tmp_path / "raised", RegistersAnew, Fault("exception", 1, "forward", step))
    outcome.assert_same(untouched)
    assert inexact(tmp_path / "raised") == [{}]


class ClipsMore(Callback):
    """Changes a setting of the trainer."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step >= 2:
            trainer.gradient_clip_val = 0.01 * trainer.global_step


def test_a_setting_of_the_trainer_that_has_changed(tmp_path: Path) -> None:
    untouched = run(tmp_path / "untouched", ClipsMore)
    outcome = run(tmp_path / "killed", ClipsMore, Fault("kill", 1, "update", 3))
    outcome.assert_same(untouched, reported="Not exact after a resume: trainer.gradient_clip_val")


class Halves(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


class TurnsIntoAnother(Callback):
    """Gives a layer another class, in place."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2:
            pl_module.last.__class__ = Halves


def test_a_layer_of_another_class_cannot_be_replaced(tmp_path: Path) -> None:
    outcome = run(tmp_path, TurnsIntoAnother, Fault("kill", 1, "forward", 4))
    assert outcome.code != 0
    assert "the ranks that trained have the submodules 'last (tests.faults.test_exactness.Halves)'" in outcome.logs
