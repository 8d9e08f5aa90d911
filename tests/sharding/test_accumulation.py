"""`reduce_dtype` with 16-bit parameters: gradients are accumulated in 32 bits over the batches of a step."""

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_replica.core.grid import Grid
from lightning_replica.errors import ConfigurationError
from lightning_replica.groups.membership import make_groups
from tests.sharding.test_levels import random_gradient, tree
from tests.support.ranks import open_world, run_ranks
from tests.support.sharded import apply, make_state, new_state, same_bits

SIZE, BATCHES, SHAPES = 4, 3, ((33, 5), (7,), (64, 3))


def accumulated(rank: int, shape: tuple[int, ...], step: int) -> Tensor:
    """The sum of the batches' gradients, of 16 bits each, in 32 bits."""
    total = random_gradient(rank, 10 * step, shape, torch.bfloat16).float()
    for batch in range(1, BATCHES):
        total = total + random_gradient(rank, 10 * step + batch, shape, torch.bfloat16)
    return total


def train(rank: int, store: Any) -> bool:
    open_world(rank, store, SIZE)
    for nodes in (1, 2):
        groups = make_groups(Grid.of(SIZE, 2, nodes), rank, timedelta(seconds=60))
        for name, partition, shared_memory in (
            ("float32", "element", True),
            ("bfloat16", "element", False),
            ("bfloat16", "parameter", True),
        ):
            parameters = [nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in SHAPES]
            sgd = torch.optim.SGD(parameters, lr=1.0)
            options = {"reduce_dtype": name, "partition": partition, "shared_memory": shared_memory}
            state = make_state(groups, parameters, sgd, **options)
            expected = [torch.zeros(shape) for shape in SHAPES]
            for step in range(2):
                state.begin_window(False)
                sgd.zero_grad()
                for batch in range(BATCHES):
                    state.before_backward(reduce=batch == BATCHES - 1)
                    own = [random_gradient(rank, 10 * step + batch, shape, torch.bfloat16) for shape in SHAPES]
                    terms = [(p * g).sum().float() for p, g in zip(parameters, own, strict=True)]
                    torch.stack(terms).sum().backward()
                    state.after_backward(reduce=batch == BATCHES - 1)
                assert all(parameter.grad is None for parameter in parameters)
                apply(state)
                wire = getattr(torch, name)
                for place, shape in enumerate(SHAPES):
                    everyone = [accumulated(other, shape, step) for other in range(SIZE)]
                    expected[place] -= tree(everyone, nodes, wire)
            for piece in state.optimizers[0].pieces:
                whole = expected[piece.order].view(-1)
                part = whole[piece.start : piece.start + piece.parameter.numel()]
                assert same_bits(piece.parameter.detach().view(-1), part), (nodes, name, partition)
            for parameter, value in zip(parameters, expected, strict=True):
                assert same_bits(parameter.detach(), value.bfloat16())
            state.release()
    return True


def test_batches_are_added_up_in_32_bits() -> None:
    assert run_ranks(SIZE, train) == [True] * SIZE


class Fused(torch.autograd.Function):
    """A product whose backward adds to ``main_grad`` by itself, as megatron-core's fused kernels do."""

    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, factor: Tensor) -> Tensor:
        ctx.parameter, ctx.factor = parameter, factor
        return (parameter * factor).sum().float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.parameter.main_grad.add_(ctx.factor)
        ctx.parameter.grad_added_to_main_grad = True
        return torch.full_like(ctx.parameter, torch.nan), None  # the dummy gradient may hold anything


def train_fused(rank: int, store: Any) -> list[Any]:
    """The same steps with and without fused accumulation, for one of two parameters."""
    open_world(rank, store, SIZE)
    groups = make_groups(Grid.of(SIZE, 2), rank, timedelta(seconds=60))
    found = []
    for fused in (False, True):
        parameters = [nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in SHAPES[:2]]
        sgd = torch.optim.SGD(parameters, lr=1.0)
        state = make_state(groups, parameters, sgd, reduce_dtype="float32")
        for step in range(3):
            state.begin_window(False)
            sgd.zero_grad()
            for batch in range(BATCHES):
                state.before_backward(reduce=batch == BATCHES - 1)
                first, second = (random_gradient(rank, 10 * step + batch, s, torch.bfloat16) for s in SHAPES[:2])
                product = Fused.apply(parameters[0], first) if fused else (parameters[0] * first).sum().float()
                (product + (parameters[1] * second).sum().float()).backward()
                state.after_backward(reduce=batch == BATCHES - 1)
            apply(state)
        found.append([parameter.tolist() for parameter in parameters])
        state.release()
        assert not hasattr(parameters[0], "main_grad")
    return found


def test_what_adds_to_main_grad_by_itself() -> None:
    for without, fused in run_ranks(SIZE, train_fused):
        assert fused == without
        assert any(value != 0.0 for row in without[0] for value in row)


@pytest.mark.parametrize("options", [{"whole_gradients": True}, {"manual": True}])
def test_where_user_code_looks_at_gradients(options: dict[str, bool]) -> None:
    parameters = [nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))]
    sgd = torch.optim.SGD(parameters)
    with pytest.raises(ConfigurationError, match=r"reduce_dtype='float32' keeps the gradients .* apart from `.grad`"):
        new_state(Grid.of(2, 2), 0, parameters, [sgd], reduce_dtype="float32", **options)
