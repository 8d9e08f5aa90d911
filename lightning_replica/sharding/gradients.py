"""The way of gradients into the shard: from backward to the average, and whole again where user code may look."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from lightning_replica.core.grid import Grid
from lightning_replica.core.pending_work import Check
from lightning_replica.core.ranges import ranged
from lightning_replica.groups.membership import Groups
from lightning_replica.sharding import shared, voting
from lightning_replica.sharding.backup import GradientCopy
from lightning_replica.sharding.buffers import Buffers
from lightning_replica.sharding.commit import Commit
from lightning_replica.sharding.gathering import gather_gradients
from lightning_replica.sharding.optimizer import ShardedOptimizer, buffers_of
from lightning_replica.sharding.reducer import Reducer
from lightning_replica.sharding.settings import EngineSettings

Optimizers: TypeAlias = Sequence[ShardedOptimizer]


@dataclass(frozen=True)
class Way:
    """The buffers that one of the rank's grids shards, and what brings their gradients into the shard.

    Attributes:
        groups: The groups of the grid.
        reducer: Averages over the grid.
        active: The buffers. Every rank of the grid has the same, though perhaps none.
    """

    groups: Groups
    reducer: Reducer
    active: Sequence[Buffers]


class Gradients:
    """The gradients of all optimizers, which hooks of autograd send while backward runs.

    Args:
        grids: The grids that the rank is in.
        optimizers: All optimizers.
        settings: How the state is sharded.
    """

    def __init__(self, grids: Sequence[Grid], optimizers: Optimizers, settings: EngineSettings) -> None:
        self._optimizers, self._whole, self._manual = optimizers, settings.whole_gradients, settings.manual
        self._can_map, self._mapped = settings.shared_memory, False
        self._reducers = {grid: Reducer(settings.wire) for grid in grids}
        self._used: dict[Grid, tuple[float, ...]] = {}  # which parameters have a gradient, where no commit says so
        for buffers in self._all():
            self._reducer_of(buffers).add(buffers)

    @property
    def is_mapped(self) -> bool:
        """Whether ranks of some grid read each other's memory."""
        return any(reducer.memory is not None for reducer in self._reducers.values())

    @property
    def pending(self) -> bool:
        """Whether gradients of this rank wait for a later batch to be reduced with."""
        return any(reducer.private for reducer in self._reducers.values())

    @property
    def receive_buffers(self) -> list[Tensor]:
        """The buffers for what other ranks send."""
        return [room for reducer in self._reducers.values() for room in reducer.receive_buffers]

    def connect(self, groups: Groups, check: Check) -> None:
        """Use ``groups`` from now on."""
        self._groups, self._check = groups, check
        for each in groups.of_grids:
            self._reducers[each.grid].connect(each, check)
        self._mapped = False

    def ways(self, active: Sequence[Buffers]) -> list[Way]:
        """Return ``active`` by grid, in the same order on all ranks of a grid."""
        return [
            Way(groups, self._reducers[groups.grid], [each for each in active if each.layout.grid == groups.grid])
            for groups in self._groups.of_grids
        ]

    def watch(self, new: Sequence[Buffers], gone: Sequence[Buffers]) -> None:
        """Watch the gradients of new buffers, and no longer those of buffers that are gone."""
        for buffers in new:
            self._reducer_of(buffers).add(buffers)
        for buffers in gone:
            self._reducer_of(buffers).remove(buffers)
        if new or gone:
            self._mapped = False

    def map_memory(self) -> None:
        """Map the other ranks' memory where that is possible and not done yet. Collective."""
        if self._can_map and not self._mapped:
            for way in self.ways(self._all()):
                blocks = [(buffers.block, buffers.main_numels) for buffers in way.active]
                way.reducer.map(shared.connect(way.groups, self._check, blocks))
            self._mapped = True

    def average_over(self, ranks: int) -> None:
        """Divide sums of gradients by this number of ranks from now on."""
        for reducer in self._reducers.values():
            reducer.present = ranks

    def before_backward(self, reduce: bool, before: GradientCopy | None) -> None:
        """Prepare for a backward pass; without ``reduce`` its gradients only accumulate."""
        if before is not None:
            before.keep()
        if self._manual:
            for buffers in self._all():
                buffers.carried.before_backward(buffers.present())
        if not reduce or (self._manual and not self._whole):
            self.reset()
            return
        for way in self.ways(self._differentiable()):
            way.reducer.begin(way.active)

    def after_backward(self, reduce: bool) -> None:
        """Make gradients whole after a backward pass, where the settings say so. Collective then."""
        if reduce and self._whole:
            self._expose(self._differentiable())

    @ranged("reduce")
    def reduce(self, optimizers: Optimizers, before: GradientCopy | None) -> None:
        """Complete the shard's averaged gradient. Collective."""
        if before is not None:
            before.keep()
        ways = self.ways(buffers_of(optimizers))
        if not self._whole:
            for way in ways:
                way.reducer.finish(way.active)
        else:
            if any(id(buffers) in way.reducer.private for way in ways for buffers in way.active):
                self._expose(buffers_of(optimizers))
            self.attach(optimizers)
        for way in ways:
            if way.groups.commit_is_shared:
                own = voting.present(way.active, way.groups)
                self._used[way.groups.grid] = voting.add_up(own, way.groups, self._check)

    def attach(self, optimizers: Optimizers) -> None:
        """Take whole gradients as they are now; hooks may have replaced or removed some."""
        for buffers in buffers_of(optimizers):
            for bucket in buffers.layout.buckets:
                buffers.complete(bucket)

    def present(self, optimizers: Optimizers) -> list[float]:
        """Return the part of the commit that says which parameters have a gradient on this rank.

        Those are left out of which `reduce` has told it. See [Note: one commit, several grids] in groups/membership.py.
        """
        ways = self.ways(buffers_of(optimizers))
        in_commit = (way for way in ways if not way.groups.commit_is_shared)
        return [number for way in in_commit for number in voting.present(way.active, way.groups)]

    def take_used(self, optimizers: Optimizers, commit: Commit) -> None:
        """Record in the buffers which parameters have a gradient on any rank."""
        for way in self.ways(buffers_of(optimizers)):
            used = self._used[way.groups.grid] if way.groups.commit_is_shared else commit.used
            for buffers, flags in voting.deal(used, way.active, way.groups):
                buffers.used = flags

    def reclaim(self) -> None:
        """Wait until no other rank reads ``main`` any more. Called before it is written to."""
        for reducer in self._reducers.values():
            if reducer.memory is not None:
                reducer.memory.reclaim()

    def reset(self) -> None:
        """Forget what was under way."""
        for reducer in self._reducers.values():
            reducer.reset()

    def drop(self) -> None:
        """Remove all gradients, also those that wait for a later batch."""
        for reducer in self._reducers.values():
            reducer.private.clear()
        for optimizer in self._optimizers:
            optimizer.drop_gradients()

    def release(self) -> None:
        """Remove all hooks."""
        for buffers in self._all():
            self._reducer_of(buffers).remove(buffers)

    def _expose(self, active: Sequence[Buffers]) -> None:
        """Make gradients whole, of those parameters that have one on any rank. Collective."""
        for way in self.ways(active):
            way.reducer.finish(way.active)
            gather_gradients(way.active, way.groups, self._check, way.reducer.memory)
            used = voting.add_up(voting.present(way.active, way.groups), way.groups, self._check)
            for buffers, flags in voting.deal(used, way.active, way.groups):
                buffers.show(flags)

    def _differentiable(self) -> list[Buffers]:
        """Return the buffers that backward may reach; those of a toggled-off optimizer are not sent."""
        return [buffers for buffers in self._all() if any(p.requires_grad for p in buffers.parameters)]

    def _reducer_of(self, buffers: Buffers) -> Reducer:
        return self._reducers[buffers.layout.grid]

    def _all(self) -> list[Buffers]:
        return buffers_of(self._optimizers)
