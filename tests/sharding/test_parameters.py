"""Parameters of every kind, and optimizers that change under way, against the unsharded optimizer; bit for bit."""

from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adagrad, AdamW, Optimizer, lr_scheduler, swa_utils

from lightning_replica.core.grid import Grid
from lightning_replica.groups.membership import Groups, make_groups
from tests.support.ranks import run_ranks
from tests.support.sharded import Case, Twin, exact_share, make_state, run_cases, same_bits, train_step
from tests.support.typed import grad_of


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def plain(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(random(*shape, dtype=dtype)) for shape in shapes]


def adamw(parameters: list[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, lr=1e-2, amsgrad=True)


def sgd(parameters: list[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)


def train(twin: Twin, steps: int = 3) -> None:
    for _ in range(steps):
        twin.step()
    twin.check()


def every_shape_and_memory_format(groups: Groups) -> None:
    for partition in ("element", "parameter"):
        for make in (adamw, sgd):
            parameters = [
                *plain((), (1,), (0,), (0, 3), (1, 1, 1), (17,), (300, 3)),
                nn.Parameter(random(2, 3, 4, 5).to(memory_format=torch.channels_last)),
                nn.Parameter(random(2, 3, 4, 5, 2).to(memory_format=torch.channels_last_3d)),
                nn.Parameter(random(3, 5).t()),
                nn.Parameter(random(3, 1, 5).permute(2, 1, 0)),
            ]
            train(Twin(groups, parameters, make, partition=partition))


def memory_with_holes_or_overlaps_becomes_contiguous(groups: Groups) -> None:
    parameters = [nn.Parameter(random(4, 6)[:, ::2]), nn.Parameter(random(4, 1).expand(4, 5))]
    twin = Twin(groups, parameters, adamw)
    twin.strides = [(3, 1), (5, 1)]
    train(twin)


def whole_matrices_keep_their_strides(groups: Groups) -> None:
    def make(parameters: list[nn.Parameter]) -> Optimizer:
        return torch.optim.Muon(parameters, lr=0.1)

    train(Twin(groups, [nn.Parameter(random(33, 20).t()), *plain((20, 33))], make, partition="parameter"))


def sixteen_bits_are_trained_in_thirty_two(groups: Groups) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for partition in ("element", "parameter"):
            twin = Twin(groups, plain((33, 20), (50,), (), (0,), dtype=dtype), adamw, partition=partition)
            train(twin, 4)
            assert {buffers.main.dtype for buffers in twin.state.buffers} == {torch.float32}
            assert any(not torch.equal(p, p.to(dtype).float()) for p in twin.theirs)  # 16 bits would not have done


def state_made_at_construction_has_thirty_two_bits_too(groups: Groups) -> None:
    both: list[dict[str, Any]] = [{}, {"fused": True}]
    for flags in both:
        parameters = plain((33, 20), (50,), dtype=torch.bfloat16)
        parameters[1].requires_grad_(False)
        twin = Twin(groups, parameters, partial(Adagrad, lr_decay=0.5, weight_decay=0.1, **flags))
        train(twin)
        for each in (twin.ours[1], twin.theirs[1]):
            each.requires_grad_(True)
        train(twin)


def user_code_may_give_weights_other_memory(groups: Groups) -> None:
    image = nn.Parameter(random(2, 3, 4, 5).to(memory_format=torch.channels_last))
    twin = Twin(groups, [image, *plain((30,), (0,))], adamw)
    train(twin)
    for each in (twin.ours, twin.theirs):
        each[0].data = torch.arange(120.0).view(2, 3, 4, 5)
        each[2].data = torch.ones(0)
    twin.state.begin_window(weights_may_differ=True)
    train(twin)


def sixty_four_bits(groups: Groups) -> None:
    train(Twin(groups, plain((33, 20), (50,), (), dtype=torch.float64), adamw))


def dtypes_mix_in_one_optimizer(groups: Groups) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
    for make in (adamw, sgd, lambda parameters: AdamW(parameters, foreach=True)):
        parameters = [p for dtype in dtypes for p in plain((9, 7), (5,), dtype=dtype)]
        twin = Twin(groups, parameters[::2] + parameters[1::2], make)
        assert len(twin.state.buffers) == 4
        train(twin)


IMPLEMENTATIONS: list[dict[str, Any]] = [{}, {"foreach": True}, {"fused": True}]


def less_than_one_parameter_or_element_a_rank(groups: Groups) -> None:
    alone = make_groups(Grid.of(4, 1), groups.rank, timedelta(seconds=60))
    for partition in ("element", "parameter"):
        for shapes in ([(3,)], [(2, 2), (1,)], [(), (0,)]):
            for flags in IMPLEMENTATIONS:
                train(Twin(alone, plain(*shapes), partial(AdamW, **flags), partition=partition))
    train(Twin(alone, plain((20, 20)), lambda p: torch.optim.Muon(p), partition="parameter"))
    train(Twin(alone, plain((20, 20), (3,)), lambda p: Adafactor(p), partition="parameter"))


def a_group_that_a_rank_owns_nothing_of(groups: Groups) -> None:
    for flags in IMPLEMENTATIONS:

        def make(parameters: list[nn.Parameter], flags: dict[str, Any] = flags) -> Optimizer:
            of_all: list[dict[str, Any]] = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.1}]
            return AdamW(of_all, **flags)

        twin = Twin(groups, plain((100,), (90,), (7,)), make, partition="parameter")
        train(twin)
        owners = {index for index in range(2) if 2 in {p.parameter for p in twin.state.buffers[0].layout.pieces(index)}}
        assert len(owners) == 1


def frozen_parameters_stay(groups: Groups) -> None:
    parameters = plain((30,), (20, 3), (7,))
    parameters[1].requires_grad_(False)
    before = parameters[1].detach().clone()
    twin = Twin(groups, parameters, adamw)
    train(twin)
    assert same_bits(parameters[1], before)
    assert twin.state.buffers[0].params.numel() < 97 + 64


def unfrozen_and_frozen_again(groups: Groups) -> None:
    parameters = plain((30,), (20, 3), (7,))
    parameters[1].requires_grad_(False)
    twin = Twin(groups, parameters, adamw)
    train(twin, 2)
    kept = {id(piece.parameter): twin.optimizer.state[piece.parameter] for piece in twin.state.optimizers[0].pieces}
    for each in (twin.ours[1], twin.theirs[1]):
        each.requires_grad_(True)
    train(twin, 2)
    for piece in twin.state.optimizers[0].pieces[: len(kept)]:
        assert twin.optimizer.state[piece.parameter] is kept[id(piece.parameter)]
    for each in (twin.ours[0], twin.theirs[0]):
        each.requires_grad_(False)
    train(twin, 2)
    assert len(twin.state.buffers) == 2


def groups_are_added_and_taken_away(groups: Groups) -> None:
    for partition in ("element", "parameter"):
        twin = Twin(groups, plain((30,), (20, 3), (7,), (40,)), lambda p: adamw(p[:2]), partition=partition)
        train(twin, 2)
        for optimizer, parameters in ((twin.optimizer, twin.ours), (twin.reference, twin.theirs)):
            optimizer.add_param_group({"params": parameters[2:], "lr": 0.1})
        train(twin, 2)
        for optimizer in (twin.optimizer, twin.reference):
            optimizer.param_groups.pop()
        train(twin, 2)
        assert len(twin.state.buffers) == 1


def a_parameter_that_is_used_twice(groups: Groups) -> None:
    parameters = plain((30,), (20, 3))
    twin = Twin(groups, [*parameters], sgd)
    gradient = random(20, 3, seed=5)
    for _ in range(2):
        share = exact_share(gradient, groups)
        tied = twin.ours[1]

        def backward(tied: torch.Tensor = tied, share: torch.Tensor = share) -> None:
            ((tied * share).sum() + (tied * share).sum()).backward()

        train_step(twin.state, backward)
        twin.theirs[1].grad = 2 * gradient
        twin.reference.step()
    twin.check()


def zeroed_gradients_are_gradients(groups: Groups) -> None:
    for make in (adamw, sgd):
        twin = Twin(groups, plain((30,), (20, 3), (7,)), make)
        twin.step(used=[0, 1])  # nobody has a gradient for 2: it is left alone, weight decay included
        twin.check()
        assert same_bits(twin.ours[2], plain((7,))[0])
        twin.step(used=[1, 2], set_to_none=False)  # 0 has a gradient of zero and goes on by its momentum
        before = twin.ours[0].detach().clone()
        twin.step(used=[1], set_to_none=False)
        twin.check()
        assert not torch.equal(before, twin.ours[0])
        twin.step(used=[1])
        twin.check()


def hooks_run_once_a_step_on_every_rank(groups: Groups) -> None:
    alone = make_groups(Grid.of(4, 1), groups.rank, timedelta(seconds=60))
    twin = Twin(alone, plain((5,)), adamw, partition="parameter")  # three ranks own nothing
    calls = []
    twin.optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: calls.append(("pre", optimizer)))
    twin.optimizer.register_step_post_hook(lambda optimizer, args, kwargs: calls.append(("post", optimizer)))
    train(twin, 2)
    assert calls == [("pre", twin.optimizer), ("post", twin.optimizer)] * 2


def the_optimizer_is_still_the_users(groups: Groups) -> None:
    parameters = plain((30,), (20, 3))
    twin = Twin(groups, parameters, adamw)
    train(twin)
    assert [id(p) for group in twin.optimizer.param_groups for p in group["params"]] == [id(p) for p in parameters]
    twin.optimizer.param_groups[0]["lr"] = twin.reference.param_groups[0]["lr"] = 0.5
    train(twin)
    twin.state.release()
    zero_grad: Any = twin.optimizer.zero_grad
    assert "zero_grad" not in vars(twin.optimizer) or zero_grad.__func__ is Optimizer.zero_grad


SCHEDULERS: dict[str, Any] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 3),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=6),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.5)], o
    ),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.05, anneal_epochs=3),
}


def schedulers_drive_the_learning_rate(groups: Groups) -> None:
    makers = [lambda p: SGD(p, lr=0.1, momentum=0.9), lambda p: AdamW(p, lr=torch.tensor(0.1), foreach=False)]
    for name, schedule in SCHEDULERS.items():
        for make in makers:
            twin = Twin(groups, plain((30,), (4, 5)), make)
            schedulers = [schedule(optimizer) for optimizer in (twin.optimizer, twin.reference)]
            rates = []
            for _ in range(4):
                twin.step()
                for scheduler in schedulers:
                    scheduler.step()
                rates.append([float(o.param_groups[0]["lr"]) for o in (twin.optimizer, twin.reference)])
            twin.check()
            assert all(ours == theirs for ours, theirs in rates), (name, rates)
            assert len({ours for ours, _ in rates}) > 1 or rates[0][0] != 0.1, (name, rates)


def sparse_gradients(groups: Groups) -> None:
    words = nn.Embedding(20, 3, sparse=True)
    words.weight = nn.Parameter(random(20, 3))
    reference = nn.Parameter(words.weight.detach().clone())
    optimizer, theirs = SGD(words.parameters(), lr=0.5, momentum=0.9), SGD([reference], lr=0.5, momentum=0.9)
    state = make_state(groups, words.parameters(), optimizer)
    for step in range(3):
        seen = torch.tensor([0, 0, groups.rank, 5 + groups.rank, 10 + step])

        def backward(seen: torch.Tensor = seen) -> None:
            (words(seen).sum() + 2 * words(seen).sum()).backward()

        train_step(state, backward)
        theirs.zero_grad()
        for rank in range(4):
            (3 * nn.functional.embedding(torch.tensor([0, 0, rank, 5 + rank, 10 + step]), reference).sum()).backward()
        grad_of(reference).div_(4)
        theirs.step()
    assert same_bits(words.weight, reference)


CASES: list[Case] = [
    every_shape_and_memory_format,
    memory_with_holes_or_overlaps_becomes_contiguous,
    whole_matrices_keep_their_strides,
    sixteen_bits_are_trained_in_thirty_two,
    state_made_at_construction_has_thirty_two_bits_too,
    user_code_may_give_weights_other_memory,
    sixty_four_bits,
    dtypes_mix_in_one_optimizer,
    less_than_one_parameter_or_element_a_rank,
    a_group_that_a_rank_owns_nothing_of,
    frozen_parameters_stay,
    unfrozen_and_frozen_again,
    groups_are_added_and_taken_away,
    a_parameter_that_is_used_twice,
    zeroed_gradients_are_gradients,
    hooks_run_once_a_step_on_every_rank,
    the_optimizer_is_still_the_users,
    schedulers_drive_the_learning_rate,
    sparse_gradients,
]


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, str]]:
    return run_ranks(4, run_cases, 4, 2, CASES, timeout_s=120)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_trains_as_unsharded(case: Case, outcomes: list[dict[str, str]]) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome.get(case.__name__) == "ok", f"rank {rank}: {outcome.get(case.__name__, outcome)}"


def test_no_scheduler_of_torch_is_missing() -> None:
    known = {name for name in lr_scheduler.__all__ if name not in ("LRScheduler", "ReduceLROnPlateau")}
    assert known <= SCHEDULERS.keys()
