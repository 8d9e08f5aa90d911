"""Ranks with different numbers of batches: joined, to the bits of torch's Join, or told apart at once."""

import csv
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_replica import ReplicaZeroStrategy
from lightning_replica.errors import ConfigurationError
from tests.support import world
from tests.support.ranks import free_port
from tests.trainer.joins import Uneven, in_one_process, loader, network, run, under_join


def trained(case: Uneven, out: Path) -> tuple[world.Outcome, dict[str, Any]]:
    outcome = world.run(case, out, target=run)
    assert outcome.code == 0, outcome.logs
    assert "corrupted" not in outcome.logs
    first, *others = [torch.load(out / f"weights{rank}.pt", weights_only=True) for rank in range(case.devices)]
    for other in others:
        assert same(other, first)
    return outcome, first


def same(a: dict[str, Any], b: dict[str, Any], limit: float = 0.0) -> bool:
    return all(float((a[name] - b[name]).abs().max()) <= limit for name in a.keys() | b.keys())


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "the first ends last": {"lengths": (5, 2)},
    "over those that have": {"average_over_all": False},
    "no length": {"sized": False},
    "no length, over those that have": {"sized": False, "average_over_all": False},
    "one has no more than one": {"lengths": (1, 6)},
    "epochs": {"epochs": 3},
    "epochs, no length": {"epochs": 3, "sized": False, "lengths": (4, 3)},
    "windows": {"accumulate": 2, "lengths": (3, 7)},
    "windows, no length": {"accumulate": 3, "lengths": (2, 7), "sized": False, "average_over_all": False},
    "clipped": {"clip": 0.1},
    "sockets": {"shared_memory": False},
    "even": {"lengths": (4, 4)},
    "no recovery": {"recovers": False, "sized": False},
    "fewer in later epochs": {"epoch_lengths": ((6, 5), (3, 5), (4, 2)), "epochs": 3},
}


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_end_with_the_bits_of_one_process(name: str, tmp_path: Path) -> None:
    case = Uneven(devices=2, **CASES[name])
    _, weights = trained(case, tmp_path)
    assert same(weights, in_one_process(case), 1e-7 if case.clip else 0.0)


# Not over those that have inputs: torch's reducer then waits in C++ for their number, and hung in two of ten runs.
@pytest.mark.parametrize("name", ["plain", "batch norm", "batch norm, the first ends last"])
def test_two_ranks_end_with_the_bits_of_the_last_joiner_under_torch(name: str, tmp_path: Path) -> None:
    case = Uneven(devices=2, batch_norm="batch norm" in name)
    if name.endswith("last"):
        case.lengths = (6, 4)
    case.port = free_port()  # type: ignore[attr-defined]
    (tmp_path / "torch").mkdir()
    outcome = world.run(case, tmp_path / "torch", target=under_join)
    assert outcome.code == 0, outcome.logs
    last = torch.load(tmp_path / "torch" / f"weights{int(case.lengths[1] > case.lengths[0])}.pt", weights_only=True)
    assert same(trained(case, tmp_path / "ours")[1], last)


@pytest.mark.parametrize("average_over_all", [True, False])
@pytest.mark.parametrize("sized", [True, False])
def test_four_ranks_differ_in_the_order_of_summation_only(sized: bool, average_over_all: bool, tmp_path: Path) -> None:
    case = Uneven(devices=4, lengths=(5, 2, 3, 5), sized=sized, average_over_all=average_over_all, epochs=2)
    outcome, weights = trained(case, tmp_path)
    assert same(weights, in_one_process(case), 1e-6)
    assert [rank["shadows"] for rank in outcome.ranks] == [
        [0, [True, True]],
        [6, [False, False]],
        [4, [False, False]],
        [0, [True, True]],
    ]


@pytest.mark.parametrize("shared_memory", [True, False])
def test_two_nodes_average_over_those_that_have(shared_memory: bool, tmp_path: Path) -> None:
    """Sums are divided on the last level only, by the right number: SGD keeps the scale of a gradient."""
    case = Uneven(devices=4, lengths=(4, 2, 3, 5), average_over_all=False, nodes=2, sgd=True)
    case.shared_memory = shared_memory
    _, weights = trained(case, tmp_path)
    assert same(weights, in_one_process(case), 1e-6)


@pytest.mark.parametrize("sized", [True, False])
def test_hooks_metrics_and_counters(sized: bool, tmp_path: Path) -> None:
    case = Uneven(devices=2, lengths=(2, 5), sized=sized, epochs=2, checkpoints=True)
    outcome, _ = trained(case, tmp_path)
    first, second = outcome.ranks
    for rank, length in ((first, 2), (second, 5)):
        hooks = ("training_step", "on_train_batch_start", "on_train_batch_end")
        assert rank["calls"] == dict.fromkeys(hooks, 2 * length)
        assert rank["step"] == [10, 2, 9]
    assert first["metrics"] == second["metrics"]
    assert first["rate"] == second["rate"] == 0.05 * 0.5**3
    # Each batch of the last epoch counts once, on whichever rank it was.
    states = [torch.load(path, weights_only=True) for path in sorted((tmp_path / "checkpoints").glob("*.ckpt"))]
    assert [state["global_step"] for state in states if state["epoch"] == 0] == [1, 2, 3, 4, 5]
    assert first["metrics"]["loss"] == pytest.approx(expected_loss(case), abs=1e-6)
    assert first["metrics"]["seen"] == pytest.approx(expected_loss(case), abs=1e-6)


def test_callbacks_that_act_on_steps(tmp_path: Path) -> None:
    """The averaged weights are those that the fit ends with, and the same on all ranks only if all ranks average."""
    case = Uneven(devices=2, lengths=(2, 6), extras=True, epochs=2)
    outcome, weights = trained(case, tmp_path)
    average = in_one_process(case, steps=0)
    for step in range(1, 13):
        now = in_one_process(case, steps=step)
        average = {name: value.lerp(now[name], 0.5) for name, value in average.items()} if step > 1 else now
    assert same(weights, average, 1e-6)
    assert all(rank["validations"] == [3, 6, 9, 12] for rank in outcome.ranks)
    with (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows if row["lr-AdamW"]] == list(range(12))


def expected_loss(case: Uneven) -> float:
    """The mean over all batches of the last epoch, of each with the weights before its step."""
    module, losses = network(batch_norm=False), []
    for step in range(case.epochs * max(case.lengths)):
        module.load_state_dict(in_one_process(case, steps=step))
        number = step % max(case.lengths)
        if step >= (case.epochs - 1) * max(case.lengths):
            for rank, length in enumerate(case.lengths):
                if number < length:
                    batch = [*loader(case, rank, case.lengths)][number]
                    losses.append(float(nn.functional.mse_loss(module(batch[0]), batch[1]).detach()))
    assert len(losses) == sum(case.lengths)
    return sum(losses) / len(losses)


def test_a_validation_weighs_all_batches(tmp_path: Path) -> None:
    case = Uneven(devices=2, lengths=(2, 5))
    outcome, weights = trained(case, tmp_path)
    module = network(batch_norm=False)
    module.load_state_dict(weights)
    batches = [batch for rank in range(2) for batch in loader(case, rank, case.lengths[::-1])]
    with torch.no_grad():
        mean = sum(float(nn.functional.mse_loss(module(x), y)) for x, y in batches) / len(batches)
    assert outcome.ranks[0]["metrics"]["val"] == pytest.approx(mean, abs=1e-6)


@pytest.mark.parametrize("sized", [True, False])
def test_a_step_while_a_rank_shadows_is_resumed(sized: bool, tmp_path: Path) -> None:
    case = Uneven(devices=2, lengths=(2, 5), sized=sized, epochs=2, checkpoints=True)
    through, weights = trained(case, tmp_path / "through")
    for checkpoint in sorted((tmp_path / "through" / "checkpoints").glob("*.ckpt"))[:6]:
        resumed = replace(case, resume=str(checkpoint), checkpoints=False)
        outcome, found = trained(resumed, tmp_path / checkpoint.stem)
        assert same(found, weights), checkpoint
        assert outcome.ranks[0]["metrics"] == through.ranks[0]["metrics"], checkpoint
        if checkpoint.stem in ("epoch=0-step=3", "epoch=0-step=4", "epoch=0-step=5"):  # rank 0 had no batch to end
            calls = outcome.ranks[0]["calls"]
            assert calls["on_train_batch_end"] == calls["training_step"], checkpoint


# Without the option, or where it cannot help


@pytest.mark.parametrize("recovery", [True, False])
def test_lengths_that_differ_are_told_before_the_first_step(recovery: bool, tmp_path: Path) -> None:
    case = Uneven(devices=2, lengths=(3, 5), join=False)
    outcome = world.run(case, tmp_path, target=run, recovery=recovery)
    assert outcome.code != 0
    assert "Ranks have different numbers of training batches (rank 0: 3; rank 1: 5)" in outcome.logs
    assert 'uneven_inputs="join"' in outcome.logs
    assert outcome.batches == [{}, {}]


@pytest.mark.parametrize("join", [True, False])
def test_data_with_a_length_on_some_ranks_is_told(join: bool, tmp_path: Path) -> None:
    """Lightning sums lengths over the ranks that have one: they would wait for ever."""
    outcome = world.run(Uneven(lengths=(3,) * 4, join=join, unsized=1), tmp_path, target=run)
    assert outcome.code != 0
    assert "Data has a length (`__len__`) on ranks 0, 2, 3, but not on rank 1." in outcome.logs
    assert "hang" not in outcome.logs
    assert outcome.batches == [{}] * 4


@pytest.mark.parametrize("lengths", [(3, 5), (5, 3)])
def test_data_without_a_length_is_told_at_the_end_of_the_shortest(lengths: Any, tmp_path: Path) -> None:
    case = Uneven(devices=2, lengths=lengths, join=False, sized=False)
    outcome = world.run(case, tmp_path, target=run)
    assert outcome.code != 0
    ended = int(lengths[1] == 3)
    assert f"The training data of rank {ended} ended after 3 batches of the epoch, but other" in outcome.logs
    assert "recovery failed" not in outcome.logs
    assert all(len(seen) == 3 for seen in outcome.batches)


@pytest.mark.parametrize("sized", [True, False])
def test_a_collective_in_a_step_that_not_all_make_is_told(sized: bool, tmp_path: Path) -> None:
    case = Uneven(devices=2, lengths=(2, 4), logs_steps=True, sized=sized)
    outcome = world.run(case, tmp_path, target=run)
    assert outcome.code != 0
    who = "rank 0 will have no inputs left" if sized else "other ranks may have no inputs left"
    assert f"The training step calls a collective, but {who} in this epoch, and will not run it." in outcome.logs
    assert all(len(seen) == 1 for seen in outcome.batches)


def test_a_collective_in_each_step_works_where_lengths_are_the_same(tmp_path: Path) -> None:
    trained(Uneven(devices=2, lengths=(3, 3), logs_steps=True), tmp_path)


@pytest.mark.parametrize("sized", [True, False])
def test_a_rank_without_any_batch_is_told(sized: bool, tmp_path: Path) -> None:
    outcome = world.run(Uneven(devices=2, lengths=(0, 4), sized=sized), tmp_path, target=run)
    assert outcome.code != 0
    assert ("within local rank has zero length" if sized else "but rank 0 has none") in outcome.logs


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"manual": True}, "Model steps its optimizers itself"),
        ({"fetches": True}, "does not work with `training_step(self, dataloader_iter)`"),
    ],
)
def test_modules_that_cannot_be_shadowed(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    outcome = world.run(Uneven(devices=2, **options), tmp_path, target=run)
    assert outcome.code != 0
    assert said in outcome.logs


def test_lengths_that_differ_in_a_later_epoch_are_told(tmp_path: Path) -> None:
    case = Uneven(devices=2, join=False, epoch_lengths=((3, 3), (3, 2)), epochs=2)
    outcome = world.run(case, tmp_path, target=run)
    assert outcome.code != 0
    assert "The training data of rank 1 ended after 2 batches of the epoch, but other" in outcome.logs


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"uneven_inputs": "shadow"}, "uneven_inputs='shadow'"),
        ({"uneven_inputs": "join", "tensor_parallel_size": 2}, "does not go together with tensor_parallel_size=2"),
        ({"divide_by_initial_world_size": False}, "has no effect without"),
        ({"uneven_inputs": "join", "divide_by_initial_world_size": 2}, "divide_by_initial_world_size=2"),
    ],
)
def test_bad_options(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        ReplicaZeroStrategy(**options)
