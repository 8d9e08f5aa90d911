"""The way of gradients into the shard: from backward to the average, and whole again where user code may look."""

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

from lightning_replica.core.ranges import ranged
from lightning_replica.core.works import Check
from lightning_replica.groups.membership import Groups
from lightning_replica.sharding import shared, voting
from lightning_replica.sharding.backup import Backup
from lightning_replica.sharding.buffers import Buffers
from lightning_replica.sharding.commit import Commit
from lightning_replica.sharding.gathering import gather_gradients
from lightning_replica.sharding.optimizer import ShardedOptimizer, buffers_of
from lightning_replica.sharding.reducer import Reducer
from lightning_replica.sharding.settings import EngineSettings
from lightning_replica.sharding.shared import SharedMemory

Optimizers: TypeAlias = Sequence[ShardedOptimizer]


class Gradients:
    """The gradients of all optimizers, which hooks of autograd send while backward runs.

    Args:
        optimizers: All optimizers.
        settings: How the state is sharded.
    """

    def __init__(self, optimizers: Optimizers, settings: EngineSettings) -> None:
        self._optimizers, self._whole, self._manual = optimizers, settings.whole_gradients, settings.manual
        self._can_map, self._mapped = settings.shared_memory, False
        self._reducer = Reducer(settings.wire)
        self._used: tuple[float, ...] = ()  # which parameters have a gradient, where the commit does not say so
        for buffers in self._all():
            self._reducer.add(buffers)

    @property
    def memory(self) -> SharedMemory | None:
        """The shared memory, if all ranks can read each other's memory."""
        return self._reducer.memory

    @property
    def pending(self) -> bool:
        """Whether gradients of this rank wait for a later batch to be reduced with."""
        return bool(self._reducer.private)

    @property
    def receive_buffers(self) -> list[Tensor]:
        """The buffers for what other ranks send."""
        return self._reducer.receive_buffers

    def connect(self, groups: Groups, check: Check) -> None:
        """Use ``groups`` from now on."""
        self._groups, self._check = groups, check
        self._reducer.connect(groups, check)
        self._mapped = False

    def watch(self, new: Sequence[Buffers], gone: Sequence[Buffers]) -> None:
        """Watch the gradients of new buffers, and no longer those of buffers that are gone."""
        for buffers in new:
            self._reducer.add(buffers)
        for buffers in gone:
            self._reducer.remove(buffers)
        if new or gone:
            self._mapped = False

    def map_memory(self) -> None:
        """Map the other ranks' memory where that is possible and not done yet. Collective."""
        if self._can_map and not self._mapped:
            blocks = [(buffers.block, buffers.layout) for buffers in self._all()]
            self._reducer.map(shared.connect(self._groups, self._check, blocks))
            self._mapped = True

    def before_backward(self, reduce: bool, backup: Backup | None) -> None:
        """Prepare for a backward pass; without ``reduce`` its gradients only accumulate."""
        if backup is not None:
            backup.keep_gradients()
        if reduce and (self._whole or not self._manual):
            self._reducer.begin(self._differentiable())
        else:
            self._reducer.reset()

    def after_backward(self, reduce: bool) -> None:
        """Make gradients whole after a backward pass, where the settings say so. Collective then."""
        if reduce and self._whole:
            self._expose(self._differentiable())

    @ranged("reduce")
    def reduce(self, optimizers: Optimizers, backup: Backup | None) -> None:
        """Complete the shard's averaged gradient. Collective."""
        if backup is not None:
            backup.keep_gradients()
        active = buffers_of(optimizers)
        if not self._whole:
            self._reducer.finish(active)
        else:
            if any(id(buffers) in self._reducer.private for buffers in active):
                self._expose(active)
            self.attach(optimizers)
        if self._groups.commit_is_shared:
            self._used = voting.add_up(voting.present(active, self._groups), self._groups, self._check)

    def attach(self, optimizers: Optimizers) -> None:
        """Take whole gradients as they are now; hooks may have replaced or removed some."""
        for buffers in buffers_of(optimizers):
            for bucket in buffers.layout.buckets:
                buffers.complete(bucket)

    def present(self, optimizers: Optimizers) -> list[float]:
        """Return the part of the commit that says which parameters have a gradient on this rank.

        It is empty where `reduce` has told it. See [Note: one commit, several grids] in groups/membership.py.
        """
        return [] if self._groups.commit_is_shared else voting.present(buffers_of(optimizers), self._groups)

    def take_used(self, optimizers: Optimizers, commit: Commit) -> None:
        """Record in the buffers which parameters have a gradient on any rank."""
        used = self._used if self._groups.commit_is_shared else commit.used
        for buffers, flags in voting.deal(used, buffers_of(optimizers), self._groups):
            buffers.used = flags

    def reclaim(self) -> None:
        """Wait until no other rank reads ``main`` any more. Called before it is written to."""
        if self._reducer.memory is not None:
            self._reducer.memory.reclaim()

    def reset(self) -> None:
        """Forget what was under way."""
        self._reducer.reset()

    def drop(self) -> None:
        """Remove all gradients, also those that wait for a later batch."""
        self._reducer.private.clear()
        for optimizer in self._optimizers:
            optimizer.drop_gradients()

    def release(self) -> None:
        """Remove all hooks."""
        for buffers in self._all():
            self._reducer.remove(buffers)

    def _expose(self, active: Sequence[Buffers]) -> None:
        """Make gradients whole, of those parameters that have one on any rank. Collective."""
        self._reducer.finish(active)
        gather_gradients(active, self._groups, self._check, self.memory)
        used = voting.add_up(voting.present(active, self._groups), self._groups, self._check)
        for buffers, flags in voting.deal(used, active, self._groups):
            buffers.show(flags)

    def _differentiable(self) -> list[Buffers]:
        """Return the buffers that backward may reach; those of a toggled-off optimizer are not sent."""
        return [buffers for buffers in self._all() if any(p.requires_grad for p in buffers.parameters)]

    def _all(self) -> list[Buffers]:
        return buffers_of(self._optimizers)
