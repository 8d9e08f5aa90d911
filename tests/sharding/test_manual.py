"""Manual optimization: batches that step several optimizers several times, and are undone."""

import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW

from lightning_replica.groups.membership import Groups
from lightning_replica.sharding.commit import StepPhase
from lightning_replica.sharding.engine import Request
from lightning_replica.sharding.state import ShardedState
from tests.support.ranks import run_ranks
from tests.support.sharded import (
    Case,
    commit,
    exact_gradients,
    exact_share,
    feed,
    make_state,
    run_cases,
    same_bits,
)


class Gan:
    """Two optimizers, the second with parameters of two dtypes, in batches of several steps."""

    def __init__(self, groups: Groups, **options: Any) -> None:
        self.groups = groups
        make = torch.Generator().manual_seed(0)
        self.first = [nn.Parameter(torch.randn(*shape, generator=make)) for shape in ((20, 30), (7,))]
        self.second = [
            nn.Parameter(torch.randn(25, generator=make).to(dtype)) for dtype in (torch.float32, torch.bfloat16)
        ]
        self.optimizers = (AdamW(self.first, lr=0.1), SGD(self.second, lr=0.1, momentum=0.9))
        everything = [*self.first, *self.second]
        self.state: ShardedState = make_state(groups, everything, *self.optimizers, manual=True, **options)

    def gradients(self, number: int, seed: int) -> list[Tensor]:
        parameters = (self.first, self.second)[number]
        return exact_gradients([p.shape for p in parameters], [p.dtype for p in parameters], seed)

    def backward(self, number: int, seed: int) -> None:
        self.state.before_backward(reduce=True)
        feed((self.first, self.second)[number], [exact_share(g, self.groups) for g in self.gradients(number, seed)])
        self.state.after_backward(reduce=True)

    def step(self, number: int) -> None:
        self.state.step_one(self.optimizers[number], Request())

    def batch(self, index: int, until: int) -> None:
        """The first ``until`` of `ACTIONS`."""
        self.state.begin_window(True)
        for action in ACTIONS[:until]:
            action(self, 10 * index)

    def close(self) -> None:
        commit(self.state)
        self.state.update()

    def everything(self) -> list[Any]:
        """Copies of weights, shards, optimizer state and gradients."""
        parameters = [*self.first, *self.second]
        found: list[Any] = [p.detach().clone() for p in parameters]
        found += [None if p.grad is None else p.grad.clone() for p in parameters]
        found += [buffers.main.clone() for buffers in self.state.buffers]
        for optimizer in self.state.optimizers:
            tensors, scalars = optimizer.state()
            found += [sorted(tensors), deepcopy(scalars), *(tensor.clone() for tensor in tensors.values())]
        return found


ACTIONS: list[Callable[[Gan, int], None]] = [
    lambda gan, seed: gan.backward(0, seed),
    lambda gan, seed: gan.step(0),
    lambda gan, seed: gan.backward(1, seed + 1),
    lambda gan, seed: gan.step(1),
    lambda gan, seed: gan.optimizers[1].zero_grad(),
    lambda gan, seed: gan.optimizers[0].zero_grad(),
    lambda gan, seed: gan.backward(0, seed + 2),
    lambda gan, seed: gan.step(0),
    lambda gan, seed: gan.optimizers[0].zero_grad(),
    lambda gan, seed: gan.backward(1, seed + 3),  # left for the next batch
]


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        same_bits(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else type(x) is type(y) and x == y
        for x, y in zip(a, b, strict=True)
    )


def several_optimizers_and_steps_in_a_batch(groups: Groups) -> None:
    for options in ({"whole_gradients": True}, {"whole_gradients": True, "partition": "parameter"}, {}):
        gan = Gan(groups, **options)
        theirs = [[nn.Parameter(p.detach().float()) for p in each] for each in (gan.first, gan.second)]
        references = (AdamW(theirs[0], lr=0.1), SGD(theirs[1], lr=0.1, momentum=0.9))
        for index in range(3):
            gan.optimizers[1].zero_grad()
            gan.batch(index, until=len(ACTIONS) - 1)
            assert not gan.state.window_is_open
            gan.close()
            for number, seed in ((0, 0), (1, 1), (0, 2)):
                for p, gradient in zip(theirs[number], gan.gradients(number, 10 * index + seed), strict=True):
                    p.grad = gradient.float()
                references[number].step()
            for ours, their in zip([*gan.first, *gan.second], [*theirs[0], *theirs[1]], strict=True):
                assert same_bits(ours, their.to(ours.dtype)), (options, index, ours, their)
        assert gan.state.step == 3


def a_batch_can_be_taken_back_from_anywhere(groups: Groups) -> None:
    for options in ({"whole_gradients": True}, {"whole_gradients": True, "partition": "parameter"}, {}):
        gan, untouched = Gan(groups, **options), Gan(groups, **options)
        for each in (gan, untouched):
            each.batch(0, len(ACTIONS))
            each.close()
        for index, until in enumerate(range(len(ACTIONS) + 1), 1):
            before = gan.everything()
            gan.batch(index, until)
            gan.state.roll_back("batch")
            assert gan.state.phase is StepPhase.IDLE
            assert gan.state.step == index
            gan.state.rebuild()
            assert same(gan.everything(), before), (options, until)
            for each in (gan, untouched):
                each.batch(index, len(ACTIONS))
                each.close()
            assert same(gan.everything(), untouched.everything()), (options, until)
            assert gan.state.step == index + 1


def a_batch_may_begin_with_its_step(groups: Groups) -> None:
    gan, untouched = Gan(groups, whole_gradients=True), Gan(groups, whole_gradients=True)

    def batch(each: Gan, index: int) -> None:
        each.state.begin_window(False)
        if index:
            each.step(0)
        each.optimizers[0].zero_grad()
        each.backward(0, index)

    for index in range(3):
        for each in (gan, untouched):
            batch(each, index)
            each.close()
        before = gan.everything()
        batch(gan, index + 1)
        gan.state.roll_back("batch")
        gan.state.rebuild()
        assert same(gan.everything(), before), index
    assert same(gan.everything(), untouched.everything())


def a_commit_closes_the_window(groups: Groups) -> None:
    gan = Gan(groups, whole_gradients=True)
    gan.batch(0, len(ACTIONS))
    gan.close()
    assert (gan.state.phase, gan.state.step, gan.state.committed) == (StepPhase.IDLE, 1, None)
    after = gan.everything()
    gan.state.roll_back("batch")  # nothing is under way: nothing is taken back
    gan.state.rebuild()
    assert same(gan.everything(), after)
    assert gan.state.step == 1


def frozen_state_outlives_an_undo(groups: Groups) -> None:
    """Adagrad makes its state at construction, for frozen parameters too, and cannot do without it later."""
    parameters = [nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(7), requires_grad=False)]
    optimizer = Adagrad(parameters, lr=0.1, initial_accumulator_value=0.5)
    state = make_state(groups, parameters, optimizer, manual=True, whole_gradients=True)

    def batch() -> None:
        state.begin_window(False)
        optimizer.zero_grad()
        state.before_backward(reduce=True)
        feed(parameters, [torch.ones_like(p) for p in parameters])
        state.after_backward(reduce=True)
        state.step_one(optimizer, Request())

    batch()
    state.roll_back("batch")
    assert parameters[1] in optimizer.state
    parameters[1].requires_grad_(True)
    batch()
    torch.testing.assert_close(parameters[1].detach(), torch.full((7,), 1 - 0.1 / 1.5**0.5))


def an_infinity_in_one_rank_s_piece(groups: Groups) -> None:
    """Under a loss scaler: the step is left out on all ranks, where gradients are whole too."""
    parameters = [nn.Parameter(torch.ones(640))]
    optimizer = SGD(parameters, lr=0.25)
    state = make_state(groups, parameters, optimizer, manual=True, whole_gradients=True)
    for scale, infinite in ((1.0, True), (1.0, False)):
        state.begin_window(False)
        optimizer.zero_grad()
        state.before_backward(reduce=True)
        gradient = torch.ones(640)
        gradient[3] = math.inf if infinite else 1.0
        feed(parameters, [gradient])
        state.after_backward(reduce=True)
        agreed = state.step_one(optimizer, Request(scale=scale))
        assert (agreed.non_finite > 0) == infinite
        assert torch.equal(parameters[0].detach(), torch.full((640,), 1.0 if infinite else 0.75))


CASES: list[Case] = [
    several_optimizers_and_steps_in_a_batch,
    a_batch_can_be_taken_back_from_anywhere,
    a_batch_may_begin_with_its_step,
    a_commit_closes_the_window,
    frozen_state_outlives_an_undo,
    an_infinity_in_one_rank_s_piece,
]


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, str]]:
    return run_ranks(4, run_cases, 4, 2, CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_manual_optimization(case: Case, outcomes: list[dict[str, str]]) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome.get(case.__name__) == "ok", f"rank {rank}: {outcome.get(case.__name__, outcome)}"
