"""Several grids in one world, as model parallelism has them: each shards its own model, under one commit."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW

from lightning_replica.core.grid import Grid
from lightning_replica.core.grids import Grids
from lightning_replica.errors import CollectiveError, ConfigurationError
from lightning_replica.groups.membership import Groups, make_groups
from lightning_replica.sharding.commit import Commit, Flags, Request, StepPhase
from tests.support.ranks import open_world, run_ranks
from tests.support.sharded import commit, digest, make_state, new_state
from tests.support.typed import tensor_of

# Two stages of a pipeline, say: ranks 0 and 2 hold the first, 1 and 3 the second.
GRIDS = (Grid((0, 2), 2), Grid((1, 3), 1))


def model(stage: int) -> nn.Module:
    """The stages differ in size, so their commits would not fit together if they told which parameters are used."""
    torch.manual_seed(stage)
    net = nn.Sequential(nn.Linear(9, 30), nn.Tanh(), nn.Linear(30, 1))
    if stage:
        net.extend([nn.Tanh(), *(nn.Linear(1, 1) for _ in range(120))])
        net.unused = nn.Parameter(torch.ones(3))
    return net


def batch(place: int, step: int) -> torch.Tensor:
    return torch.randn(4, 9, generator=torch.Generator().manual_seed(10 * step + place))


class Stage:
    """One rank's part of a stage."""

    def __init__(self, groups: Groups, stage: int, **options: Any) -> None:
        self.net, self.groups = model(stage), groups
        self.optimizer = AdamW(self.net.parameters(), lr=1e-2, weight_decay=0.1)
        self.state = make_state(groups, self.net.parameters(), self.optimizer, **options)

    def backward(self, step: int, factor: float = 1.0) -> None:
        self.state.begin_window(False)
        self.optimizer.zero_grad()
        self.state.before_backward(reduce=True)
        (self.net(batch(self.groups.place, step)).square().mean() * factor).backward()
        self.state.after_backward(reduce=True)
        self.state.reduce()

    def finish(self) -> None:
        self.state.update()
        self.state.gather()

    @property
    def weights(self) -> list[list[float]]:
        return [p.detach().flatten().tolist() for p in self.net.parameters()]


def open_stage(rank: int, store: Any) -> tuple[Groups, int]:
    open_world(rank, store, 4)
    return make_groups(GRIDS[rank % 2], rank, timedelta(seconds=60)), rank % 2


def both_stages(rank: int, store: Any, whole: bool) -> Any:
    groups, number = open_stage(rank, store)
    stage = Stage(groups, number, whole_gradients=whole)
    for step in range(4):
        stage.backward(step)
        commit(stage.state)
        stage.finish()
    return stage.weights


def one_stage(rank: int, store: Any, number: int) -> Any:
    open_world(rank, store, 2)
    stage = Stage(make_groups(Grid.of(2, 1), rank, timedelta(seconds=60)), number)
    for step in range(4):
        stage.backward(step)
        commit(stage.state)
        stage.finish()
    return stage.weights


def test_each_grid_trains_as_it_does_alone() -> None:
    alone = [run_ranks(2, one_stage, number)[0] for number in (0, 1)]
    assert alone[0] != alone[1]
    for whole in (False, True):
        assert run_ranks(4, both_stages, whole) == [alone[0], alone[1]] * 2


def one_commit(rank: int, store: Any) -> Any:
    """What each rank sees of requests that one rank makes, of infinities on one grid, and of the norm."""
    groups, number = open_stage(rank, store)
    stage, found = Stage(groups, number), []
    stage.backward(0)
    told = stage.state.commit(stage.state.part_of_commit(Request(), Flags(stop=rank == 2, save=rank == 3)))
    found.append([told.stop, told.save, told.used, told.grad_norm_sq])
    own = sum(float(g.double().square().sum()) for b in stage.state.buffers for g in b.own_gradients())
    total = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(total)
    found.append(abs(told.grad_norm_sq / float(total) - 1) < 1e-6)  # that one sums squares in 64 bits
    stage.finish()
    before = stage.weights
    stage.backward(1, factor=float("inf") if number == 1 else 1.0)
    told = commit(stage.state, Request(scale=1.0))
    stage.finish()
    return [*found, told.non_finite, stage.weights == before, stage.state.step]


def test_a_commit_is_everyone_s() -> None:
    results = run_ranks(4, one_commit)
    assert all(result == results[0] for result in results)
    (stop, save, used, _), norm_is_that_of_both, non_finite, kept, steps = results[0]
    assert (stop, save, used, norm_is_that_of_both) == (1, 1, [], True)
    assert non_finite == 2  # both ranks of the second grid hold some of it
    assert (kept, steps) == (True, 2)  # the first grid leaves its update out too


def roll_forward(rank: int, store: Any) -> Any:
    """Rank 0 misses the commit, and makes the update with what a rank of the other grid has seen."""
    groups, number = open_stage(rank, store)
    stage = Stage(groups, number)
    stage.backward(0)
    if rank == 0:
        part, all_reduce = stage.state.part_of_commit(Request(clip_norm=0.01)), dist.all_reduce

        def misses(tensor: torch.Tensor, **options: Any) -> Any:
            all_reduce(tensor, group=options["group"])
            raise CollectiveError("cut off")

        dist.all_reduce = misses  # type: ignore[assignment]
        try:
            stage.state.commit(part)
        except CollectiveError:
            dist.all_reduce = all_reduce
        assert stage.state.phase is StepPhase.ENTERED
        seen = torch.zeros(len(Commit(0.0).vector), dtype=torch.float64)
        dist.broadcast(seen, 1)
        stage.state.roll_forward(tuple(seen.tolist()))
        stage.state.gather()
    else:
        told = commit(stage.state, Request(clip_norm=0.01))
        dist.broadcast(torch.tensor(told.vector, dtype=torch.float64), 1)
        stage.finish()
    return [digest(stage.state), stage.weights]


def test_a_rank_rolls_forward_with_the_commit_of_another_grid() -> None:
    results = run_ranks(4, roll_forward)
    assert results[0] == results[2]
    assert results[1][1] == results[3][1]


def test_a_grid_numbers_its_ranks_by_place() -> None:
    grid = Grid((5, 9, 2, 7), 2)
    assert [grid.place_of(rank) for rank in (5, 9, 2, 7)] == [0, 1, 2, 3]
    assert (grid.peers(9), grid.replica_ranks(2), grid.shard_of(7), grid.replica_of(7)) == ((9, 7), (2, 7), 1, 1)
    parameter = nn.Parameter(torch.ones(64))
    state = new_state(grid, 7, [parameter], [SGD([parameter], lr=0.1)], shared_memory=False)
    assert {piece.rank for piece in state.optimizers[0].pieces} <= {9, 7}


# Ranks 0 and 2 have other experts than 1 and 3; all have the rest.
DENSE, EXPERTS = Grid.of(4, 2), (Grid((0, 2), 2, 1, 4), Grid((1, 3), 2, 1, 4))


def with_experts(rank: int, store: Any, options: dict[str, Any]) -> Any:
    """Train on gradients of whole numbers, whose sums are exact in every order; weights by hand beside it."""
    open_world(rank, store, 4)
    groups = make_groups(DENSE, rank, timedelta(seconds=60), others=[EXPERTS[rank % 2]])
    torch.manual_seed(0)
    rest, shared = nn.Parameter(torch.randn(40, 9)), nn.Parameter(torch.randn(13))
    expert = nn.Parameter(torch.randn(2, 31, 9)[rank % 2].clone())
    parameters = [rest, expert, shared]
    by_hand = [p.detach().clone() for p in parameters]
    optimizer = SGD(parameters, lr=0.125)
    state = make_state(groups, parameters, optimizer, experts=frozenset({1}), **options)
    norms = []
    for step in range(3):
        state.begin_window(False)
        optimizer.zero_grad()
        state.before_backward(reduce=True)
        loss = sum((p * gradient(p, order, step, rank)).sum() for order, p in enumerate(parameters))
        tensor_of(loss).backward()
        state.after_backward(reduce=True)
        state.reduce()
        told = commit(state)
        norms.append(told.grad_norm_sq)
        state.update()
        state.gather()
        for order, (value, p) in enumerate(zip(by_hand, parameters, strict=True)):
            ranks = (rank % 2, rank % 2 + 2) if order == 1 else range(4)
            value -= 0.125 * sum(gradient(p, order, step, r) for r in ranks) / 4
    return [all(map(torch.equal, parameters, by_hand)), digest(state), norms, norms_by_hand(expert, rest, shared)]


def gradient(parameter: nn.Parameter, order: int, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * order + 10 * step + rank)
    return torch.randint(-8, 8, parameter.shape, generator=generator).float()


def norms_by_hand(expert: nn.Parameter, rest: nn.Parameter, shared: nn.Parameter) -> list[float]:
    """Of the mean gradient: both experts count, and what all ranks have counts once."""
    found = []
    for step in range(3):
        means = [
            tensor_of(sum(gradient(p, order, step, r) for r in ranks)) / 4
            for order, p, ranks in [
                (0, rest, range(4)),
                (2, shared, range(4)),
                (1, expert, (0, 2)),
                (1, expert, (1, 3)),
            ]
        ]
        found.append(sum(float(mean.double().square().sum()) for mean in means))
    return found


@pytest.mark.parametrize("options", [{}, {"shared_memory": False}, {"whole_gradients": True}], ids=str)
def test_experts_have_a_grid_of_their_own(options: dict[str, Any]) -> None:
    results = run_ranks(4, with_experts, options)
    for exact, _, norms, expected in results:
        assert exact
        assert norms == pytest.approx(expected, rel=1e-6)  # squares are added up in 32 bits
    digests = [each[1] for each in results]
    assert digests[:2] == digests[2:], "peers hold the same bits, of both grids"
    assert digests[0] != digests[1]


def test_experts_whose_peers_differ_from_those_of_the_rest() -> None:
    with pytest.raises(ConfigurationError, match="the peers of every rank must be the same"):
        Grids((DENSE,), ("",), (Grid((0, 1), 2), Grid((2, 3), 2)))
    with pytest.raises(ConfigurationError, match="every rank must be in one grid of experts"):
        Grids((DENSE,), ("",), (Grid((0, 2), 2),))
