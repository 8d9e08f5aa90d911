"""Gradients that user code looks at and changes, and batches that step several optimizers several times."""

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad, AdamW

from lightning_replica.groups.membership import Groups
from lightning_replica.sharding.commit import StepPhase
from lightning_replica.sharding.engine import Request
from lightning_replica.sharding.state import ShardedState
from tests.support.ranks import run_ranks
from tests.support.sharded import (
    Case,
    apply,
    commit,
    exact_gradients,
    exact_share,
    feed,
    make_state,
    run_cases,
    same_bits,
)


class Net(nn.Module):
    """A part for every rank, one for rank 0 only and one for nobody."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(16, 24), nn.Linear(24, 1)
        self.rare, self.unused = nn.Linear(24, 1), nn.Linear(24, 3)

    def forward(self, x: Tensor, with_rare: bool) -> Tensor:
        hidden = torch.tanh(self.body(x))
        return self.head(hidden) + (self.rare(hidden) if with_rare else 0)


class Pair:
    """Our network with whole gradients, and DDP's."""

    def __init__(self, groups: Groups, **options: Any) -> None:
        self.groups, self.ours, self.theirs = groups, Net(), Net()
        self.optimizer, self.reference = AdamW(self.ours.parameters()), AdamW(self.theirs.parameters())
        self.ddp = DistributedDataParallel(self.theirs, find_unused_parameters=True)
        self.state = make_state(groups, self.ours.parameters(), self.optimizer, whole_gradients=True, **options)
        self.batches = 0

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self.reference.zero_grad()

    def backward(self, last: bool = True) -> None:
        self.batches += 1
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(self.batches * 100 + self.groups.rank))
        with_rare = self.groups.rank == 0 and self.batches % 2 == 1
        self.state.before_backward(reduce=last)
        self.ours(x, with_rare).square().mean().backward()
        self.state.after_backward(reduce=last)
        with nullcontext() if last else self.ddp.no_sync():
            self.ddp(x, with_rare).square().mean().backward()

    def change(self, change: Callable[[Net], None]) -> None:
        change(self.ours)
        change(self.theirs)

    def step(self) -> None:
        apply(self.state)
        self.reference.step()
        assert all(same_bits(a, b) for a, b in zip(self.ours.parameters(), self.theirs.parameters(), strict=True))

    def check_gradients(self) -> None:
        for (name, ours), theirs in zip(self.ours.named_parameters(), self.theirs.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None), (name, ours.grad, theirs.grad)
            assert ours.grad is None or same_bits(ours.grad, theirs.grad), (name, ours.grad, theirs.grad)


def whole_gradients_are_those_of_ddp(groups: Groups) -> None:
    for partition in ("element", "parameter"):
        for accumulate in (1, 3):
            pair = Pair(groups, partition=partition)
            for number in range(3):
                pair.state.begin_window(False)
                pair.zero_grad()
                for batch in range(accumulate):
                    pair.backward(last=batch == accumulate - 1)
                pair.check_gradients()
                used = number == 0 or accumulate == 3
                assert (pair.ours.rare.weight.grad is not None) == (used or pair.batches % 2 == 1)
                assert pair.ours.unused.weight.grad is None
                pair.step()
                pair.check_gradients()  # the update leaves them as they are


def gradients_that_nobody_zeroes_go_on(groups: Groups) -> None:
    pair = Pair(groups)
    for _ in range(3):
        pair.state.begin_window(False)
        pair.backward()
        pair.check_gradients()
        pair.step()


def halve(net: Net) -> None:
    net.head.weight.grad.mul_(0.5)


def replace(net: Net) -> None:
    net.body.weight.grad = net.body.weight.grad.sign()


def remove(net: Net) -> None:
    net.body.bias.grad = None


def invent(net: Net) -> None:
    net.unused.weight.grad = torch.ones_like(net.unused.weight)


def transpose(net: Net) -> None:
    net.body.weight.grad = net.body.weight.grad.t().contiguous().t()


def through_data(net: Net) -> None:
    net.head.bias.grad.data = torch.full_like(net.head.bias.grad, 3.0)


def clip(net: Net) -> None:
    nn.utils.clip_grad_norm_(list(net.parameters()), 0.01)


def what_happens_to_gradients_before_the_step_counts(groups: Groups) -> None:
    changes: list[Callable[[Net], None]] = [halve, replace, remove, invent, transpose, through_data, clip]
    pair = Pair(groups)
    for change in [*changes, *changes]:
        pair.state.begin_window(False)
        pair.zero_grad()
        pair.backward()
        pair.change(change)
        pair.check_gradients()
        pair.step()


# Manual optimization


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


def backward_with_a_graph(groups: Groups) -> None:
    parameters, theirs = ([nn.Parameter(torch.full((30,), 0.5)), nn.Parameter(torch.ones(4, 2))] for _ in range(2))
    optimizer, reference = SGD(parameters, lr=0.25), SGD(theirs, lr=0.25)
    state = make_state(groups, parameters, optimizer)
    for _ in range(3):
        state.begin_window(False)
        optimizer.zero_grad()
        state.before_backward(reduce=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using backward.. with create_graph=True")
            sum((groups.rank + 1) * p.pow(3).sum() for p in parameters).backward(create_graph=True)
        apply(state)
        for p in theirs:
            p.grad = 2.5 * 3 * p.detach() ** 2
        reference.step()
        assert not any(buffers.grads.requires_grad for buffers in state.buffers)
    for ours, their in zip(parameters, theirs, strict=True):
        torch.testing.assert_close(ours, their)


def whole_gradients_are_the_same_on_all_ranks(groups: Groups) -> None:
    for partition in ("element", "parameter"):
        for dtype in (torch.float32, torch.bfloat16):
            parameters = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in ((33, 20), (5,), (7,), (), (3,))]
            optimizer = AdamW(parameters)
            state = make_state(groups, parameters, optimizer, whole_gradients=True, partition=partition)
            gradients = exact_gradients([p.shape for p in parameters], [dtype] * 5, 0)
            used = [i for i in range(5) if i != 2 and (i != 4 or groups.rank == 3)]  # 2 by nobody, 4 by rank 3 only
            shares = [4 * gradients[4] if i == 4 else exact_share(gradients[i], groups) for i in used]
            state.begin_window(False)
            state.before_backward(reduce=True)
            feed([parameters[i] for i in used], shares)
            state.after_backward(reduce=True)
            assert parameters[2].grad is None
            assert all(same_bits(parameters[i].grad, gradients[i]) for i in (0, 1, 3, 4))
            apply(state)


OF_TWO: list[Case] = [
    whole_gradients_are_those_of_ddp,
    gradients_that_nobody_zeroes_go_on,
    what_happens_to_gradients_before_the_step_counts,
]
OF_FOUR: list[Case] = [
    backward_with_a_graph,
    whole_gradients_are_the_same_on_all_ranks,
    several_optimizers_and_steps_in_a_batch,
    a_batch_can_be_taken_back_from_anywhere,
    a_batch_may_begin_with_its_step,
    a_commit_closes_the_window,
    frozen_state_outlives_an_undo,
    an_infinity_in_one_rank_s_piece,
]


@pytest.fixture(scope="module")
def outcomes() -> dict[int, list[dict[str, str]]]:
    return {size: run_ranks(size, run_cases, size, 2, cases) for size, cases in ((2, OF_TWO), (4, OF_FOUR))}


@pytest.mark.parametrize("case", [*OF_TWO, *OF_FOUR], ids=lambda case: case.__name__)
def test_gradients(case: Case, outcomes: dict[int, list[dict[str, str]]]) -> None:
    for rank, outcome in enumerate(outcomes[2 if case in OF_TWO else 4]):
        assert outcome.get(case.__name__) == "ok", f"rank {rank}: {outcome.get(case.__name__, outcome)}"
