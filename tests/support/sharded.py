"""Helpers to drive `ShardedState` step by step inside `run_ranks`, many states in one world."""

import traceback
import warnings
import zlib
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_replica._compat.torch import as_bytes
from lightning_replica.core.grid import Grid
from lightning_replica.groups.membership import Groups, make_groups
from lightning_replica.sharding import moving
from lightning_replica.sharding.engine import Commit, EngineSettings, Request
from lightning_replica.sharding.state import ShardedState
from tests.support.ranks import open_world

Case: TypeAlias = Callable[[Groups], None]


def digest(state: ShardedState) -> int:
    """A CRC-32 of a shard's values and optimizer state; peers must have the same after every step."""
    crc = 0
    _, tensors = moving.export_shard(state.optimizers, with_gradients=False)
    for tensor in tensors:
        crc = zlib.crc32(as_bytes(tensor.cpu()), crc)
    return crc


def open_groups(rank: int, store: Any, world_size: int, replicas: int) -> Groups:
    """The default group and those of one grid."""
    open_world(rank, store, world_size)
    return make_groups(Grid.of(world_size, replicas), rank, timedelta(seconds=60))


def new_state(
    grids: Grid | Sequence[Grid],
    rank: int,
    parameters: Iterable[nn.Parameter],
    optimizers: Iterable[Optimizer],
    **options: Any,
) -> ShardedState:
    """A state that is not connected yet; buckets of 1000 bytes unless ``options`` say otherwise."""
    settings = EngineSettings(**{"bucket_bytes": 1000, **options})
    grids = [grids] if isinstance(grids, Grid) else grids
    return ShardedState(grids, rank, list(parameters), list(optimizers), settings)


def make_state(groups: Groups, parameters: Iterable[nn.Parameter], *optimizers: Optimizer, **options: Any) -> Any:
    """A connected state, all of which is watched."""
    state = new_state(
        [each.grid for each in groups.of_grids], groups.rank, parameters, optimizers, **{"guard": "full", **options}
    )
    state.connect(groups, lambda: None)
    return state


def apply(state: ShardedState, request: Request = Request()) -> None:  # noqa: B008
    """From the gradients of one backward pass to the gathered parameters."""
    state.reduce()
    commit(state, request)
    state.update()
    state.gather()


def commit(state: ShardedState, request: Request = Request()) -> Commit:  # noqa: B008
    """Asks a rank for its part, and commits."""
    return state.commit(state.part_of_commit(request))


def train_step(state: ShardedState, backward: Callable[[], None], zero: bool = True) -> None:
    """A whole step of one batch."""
    state.begin_window(False)
    if zero:
        for optimizer in state.optimizers:
            optimizer.optimizer.zero_grad()
    state.before_backward(reduce=True)
    backward()
    state.after_backward(reduce=True)
    apply(state)


def exact_gradients(shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], seed: int) -> list[Tensor]:
    """Random gradients, all mantissa bits in use, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(tuple(shape), generator=generator).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)
    ]


def exact_share(gradient: Tensor, groups: Groups) -> Tensor:
    """This rank's share of ``N * gradient``: every element comes from one rank alone.

    For N a power of two the average over ranks is then ``gradient`` to the last bit, whatever the order of summation.
    """
    world_size = groups.grid.size
    owner = torch.arange(gradient.numel()).view(gradient.shape) % world_size
    return torch.where(owner == groups.rank, gradient * world_size, torch.zeros_like(gradient))


def feed(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """A backward pass that gives every parameter exactly its gradient."""
    pairs = [(p, g) for p, g in zip(parameters, gradients, strict=True) if p.requires_grad]
    sum(((p * g).sum().float() for p, g in pairs), torch.zeros(())).backward()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have dtype, shape and every bit in common."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(
        a.detach().contiguous().view(-1).view(torch.uint8), b.detach().contiguous().view(-1).view(torch.uint8)
    )


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference, in units of the reference's largest element."""
    if not a.numel():
        return 0.0
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))


class Twin:
    """Parameters under a sharded optimizer, and copies of them under the same optimizer unsharded.

    Copies of 16-bit parameters have 32 bits, as the shards have.
    """

    def __init__(
        self,
        groups: Groups,
        parameters: Sequence[nn.Parameter],
        make_optimizer: Callable[[list[nn.Parameter]], Optimizer],
        **options: Any,
    ) -> None:
        self.groups = groups
        self.ours, self.theirs = list(parameters), [_main_copy(parameter) for parameter in parameters]
        self.optimizer, self.reference = make_optimizer(self.ours), make_optimizer(self.theirs)
        self.strides = [parameter.stride() for parameter in parameters]
        self.state = make_state(groups, parameters, self.optimizer, **options)
        self.steps = 0

    def step(self, used: Iterable[int] | None = None, set_to_none: bool = True) -> None:
        """One step of both, with the same averaged gradients, for the parameters of those indices."""
        self.optimizer.zero_grad(set_to_none)
        self.reference.zero_grad(set_to_none)
        gradients = exact_gradients([p.shape for p in self.ours], [p.dtype for p in self.ours], self.steps)
        chosen = [i for i in range(len(self.ours)) if self.ours[i].requires_grad and (used is None or i in used)]
        shares = [exact_share(gradients[i], self.groups) for i in chosen]
        train_step(self.state, lambda: feed([self.ours[i] for i in chosen], shares), zero=False)
        for i in chosen:
            whole = torch.empty_like(self.theirs[i]).copy_(gradients[i])
            before = self.theirs[i].grad
            self.theirs[i].grad = whole if before is None else before + whole
        self.reference.step()
        self.steps += 1

    def check(self) -> None:
        """Both have the same bits, and parameters their strides."""
        for index, (ours, theirs) in enumerate(zip(self.ours, self.theirs, strict=True)):
            assert same_bits(ours, theirs.to(ours.dtype)), (index, ours, theirs)
            assert ours.stride() == self.strides[index], (index, ours.stride(), self.strides[index])


def _main_copy(parameter: nn.Parameter) -> nn.Parameter:
    dtype = torch.float32 if parameter.element_size() == 2 else parameter.dtype
    copy = torch.empty_like(parameter, dtype=dtype).copy_(parameter.detach())
    return nn.Parameter(copy.detach(), requires_grad=parameter.requires_grad)


def run_cases(rank: int, store: Any, world_size: int, replicas: int, cases: Sequence[Case]) -> dict[str, str]:
    """Runs one case after the other, up to the first that raises; "ok" or the traceback of each."""
    groups = open_groups(rank, store, world_size, replicas)
    outcomes: dict[str, str] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for case in cases:
            try:
                case(groups)
            except Exception:
                outcomes[case.__name__] = traceback.format_exc()
                break
            outcomes[case.__name__] = "ok"
    return outcomes
