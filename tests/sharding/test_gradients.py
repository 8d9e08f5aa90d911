"""Gradients that user code looks at and changes."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from lightning_replica.groups.membership import Groups
from tests.support.ranks import run_ranks
from tests.support.sharded import (
    Case,
    apply,
    exact_gradients,
    exact_share,
    feed,
    make_state,
    run_cases,
    same_bits,
)
from tests.support.typed import grad_of, tensor_of


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
            if ours.grad is not None:
                assert same_bits(ours.grad, grad_of(theirs)), (name, ours.grad, theirs.grad)


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
    grad_of(net.head.weight).mul_(0.5)


def replace(net: Net) -> None:
    net.body.weight.grad = grad_of(net.body.weight).sign()


def remove(net: Net) -> None:
    net.body.bias.grad = None


def invent(net: Net) -> None:
    net.unused.weight.grad = torch.ones_like(net.unused.weight)


def transpose(net: Net) -> None:
    net.body.weight.grad = grad_of(net.body.weight).t().contiguous().t()


def through_data(net: Net) -> None:
    gradient = grad_of(net.head.bias)
    gradient.data = torch.full_like(gradient, 3.0)


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
            tensor_of(sum((groups.rank + 1) * p.pow(3).sum() for p in parameters)).backward(create_graph=True)
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
            assert all(same_bits(grad_of(parameters[i]), gradients[i]) for i in (0, 1, 3, 4))
            apply(state)


OF_TWO: list[Case] = [
    whole_gradients_are_those_of_ddp,
    gradients_that_nobody_zeroes_go_on,
    what_happens_to_gradients_before_the_step_counts,
]
OF_FOUR: list[Case] = [
    backward_with_a_graph,
    whole_gradients_are_the_same_on_all_ranks,
]


@pytest.fixture(scope="module")
def outcomes() -> dict[int, list[dict[str, str]]]:
    return {size: run_ranks(size, run_cases, size, 2, cases) for size, cases in ((2, OF_TWO), (4, OF_FOUR))}


@pytest.mark.parametrize("case", [*OF_TWO, *OF_FOUR], ids=lambda case: case.__name__)
def test_gradients(case: Case, outcomes: dict[int, list[dict[str, str]]]) -> None:
    for rank, outcome in enumerate(outcomes[2 if case in OF_TWO else 4]):
        assert outcome.get(case.__name__) == "ok", f"rank {rank}: {outcome.get(case.__name__, outcome)}"
