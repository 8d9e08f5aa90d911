"""One rank's part in a step: from gradients to the gathered parameters, and back to life after a fault."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_replica.digests import Digest, GuardMode
from lightning_replica.errors import ConfigurationError, ProtocolError
from lightning_replica.grid import Grid
from lightning_replica.points import reach
from lightning_replica.sharding import collectives, moving, shared, usage
from lightning_replica.sharding.backup import Backup
from lightning_replica.sharding.buffers import Buffers
from lightning_replica.sharding.collectives import Groups
from lightning_replica.sharding.commit import Commit, Request, StepPhase, clip_coefficient, part_of_commit
from lightning_replica.sharding.gathering import gather_parameters
from lightning_replica.sharding.guard import Guard
from lightning_replica.sharding.layout import Partition
from lightning_replica.sharding.listing import shard_tensors
from lightning_replica.sharding.optimizer import ShardedOptimizer, check_disjoint
from lightning_replica.sharding.reducer import Reducer
from lightning_replica.works import Check, finish


class ShardedState:
    """The sharded parameters, gradients and optimizers of one rank.

    Args:
        grid: The table of ranks.
        rank: This rank.
        parameters: All parameters of the module, in registration order.
        optimizers: The user's optimizers.
        bucket_bytes: Size at which a bucket is closed.
        partition: How buckets are cut.
        whole_gradients: Whether every ``.grad`` is the averaged gradient after a backward pass, as under DDP, which
            costs a gather; otherwise it is so for the own shard only.
        manual: Whether one step of this state is a batch with any number of optimizer steps.
        shared_memory: Whether ranks of one machine read each other's memory instead of sending; only the host's.
        guard: How much of the shard is watched for bits that change by themselves.
        recoverable: Whether a step may have to be undone; otherwise nothing is kept or watched that only this needs.
        fence: Held while the shard, or a copy of it, is written: see `devices.interface.Device`.

    Attributes:
        step: Steps applied to this rank's shard, t.
        phase: How far the step t -> t+1 has come.
        committed: The commit of step t -> t+1, from COMMITTED on.
        request: What the update of the step under way does to the gradient.
    """

    def __init__(
        self,
        grid: Grid,
        rank: int,
        parameters: Sequence[nn.Parameter],
        optimizers: Sequence[Optimizer],
        bucket_bytes: int,
        partition: Partition = "element",
        whole_gradients: bool = False,
        manual: bool = False,
        shared_memory: bool = True,
        guard: GuardMode = "sampled",
        recoverable: bool = True,
        fence: AbstractContextManager[None] = nullcontext(),  # noqa: B008
    ) -> None:
        self.grid, self.rank, self._recoverable, self._fence = grid, rank, recoverable, fence
        self._guard = Guard(guard if recoverable else "off", rank, grid.shard_of(rank))
        self._shared_memory, self._mapped = shared_memory and grid.world_size > 1, False
        self.whole_gradients, self.manual = whole_gradients, manual
        check_disjoint(optimizers)
        self.optimizers = [
            ShardedOptimizer(optimizer, parameters, grid, rank, bucket_bytes, partition, self._shared_memory)
            for optimizer in optimizers
        ]
        if not self.buffers:
            raise ConfigurationError(
                "There is no parameter to train: no optimizer holds one with requires_grad=True."
                " Check `configure_optimizers` and what was frozen."
            )
        self.reducer = Reducer()
        for buffers in self.buffers:
            self.reducer.add(buffers)
        self.step, self.phase = 0, StepPhase.IDLE
        self.committed: Commit | None = None
        self.request = Request()
        self._backup: Backup | None = None
        self._before_window: list[Tensor] | None = None
        self._hit = False  # memory of the device was hit, and may hold anything

    @property
    def buffers(self) -> list[Buffers]:
        """All flat buffers."""
        return [buffers for optimizer in self.optimizers for buffers in optimizer.buffers]

    def connect(self, groups: Groups, check: Check) -> None:
        """Uses ``groups`` from now on."""
        self._groups, self._check = groups, check
        self.reducer.connect(groups, check)
        self._mapped = False

    def follow_groups(self) -> None:
        """Takes in parameters that were added to a param group or unfrozen, drops what was removed."""
        for optimizer in self.optimizers:
            new, gone = optimizer.follow_groups()
            self._watch(new, gone)

    def _watch(self, new: Sequence[Buffers], gone: Sequence[Buffers]) -> None:
        for buffers in new:
            self.reducer.add(buffers)
        for buffers in gone:
            self.reducer.remove(buffers)
        if new or gone:
            self._mapped = False

    def _map(self) -> None:
        """Maps the other ranks' memory where that is possible and not done yet. Collective."""
        if self._shared_memory and not self._mapped:
            blocks = [(buffers.block, buffers.layout) for buffers in self.buffers]
            self.reducer.memory = shared.connect(self._groups, self._check, blocks)
            self._mapped = True

    # A step, in the order of calls

    def begin_window(self, weights_may_differ: bool) -> None:
        """The first batch of a step is about to begin.

        Args:
            weights_may_differ: Whether user code may have written to the weights since the last step.
        """
        self.follow_groups()
        self._before_window = None
        self._map()
        if weights_may_differ and self._is_written():
            self.look()  # the weights, once adopted, will hide what has happened to the shard
            with self._fence:
                if self._recoverable:
                    self._before_window = [buffers.main.clone() for buffers in self.buffers]
                self._adopt(self.buffers)
        self._guard.keep(self.step, self.optimizers)
        self._backup = Backup(self.optimizers, self._fence) if self.manual and self._recoverable else None

    def _is_written(self) -> bool:
        """Whether weights are no longer what the shard says."""
        for buffers in self.buffers:
            buffers.reclaim()
        return not all(buffers.is_params() for buffers in self.buffers)

    def before_backward(self, reduce: bool) -> None:
        """Makes ready for a backward pass; without ``reduce`` its gradients only accumulate."""
        if self._backup is not None:
            self._backup.keep_gradients()
        if reduce and (self.whole_gradients or not self.manual):
            self.reducer.begin(self._differentiable())
        else:
            self.reducer.reset()

    def after_backward(self, reduce: bool) -> None:
        """The backward pass is over; where gradients are to be whole, now they become so."""
        if reduce and self.whole_gradients:
            self._expose(self._differentiable())

    def reduce(self, optimizers: Sequence[ShardedOptimizer] | None = None) -> None:
        """Completes the shard's averaged gradient, of all optimizers or of some."""
        if self._backup is not None:
            self._backup.keep_gradients()
        active = self._buffers_of(optimizers)
        if not self.whole_gradients:
            self.reducer.finish(active)
            return
        if any(id(buffers) in self.reducer.private for buffers in active):
            self._expose(active)
        self.attach_gradients(optimizers)

    def attach_gradients(self, optimizers: Sequence[ShardedOptimizer] | None = None) -> None:
        """Takes whole gradients as they are now; hooks may have put others in place, or taken some away."""
        for buffers in self._buffers_of(optimizers):
            for bucket in buffers.layout.buckets:
                buffers.complete(bucket)

    def clip_whole(self, optimizer: ShardedOptimizer, limit: float) -> None:
        """Scales an optimizer's whole gradient to a global 2-norm of at most ``limit``. Collective.

        The norm has the bits of the one in the commit: it makes no difference whether somebody looks at gradients.
        """
        vector = self._vector([optimizer])
        collectives.all_reduce(vector, self._groups, self._check)
        coefficient = clip_coefficient(limit, math.sqrt(float(vector[0])))
        for buffers in optimizer.buffers:
            if coefficient != 1.0:
                buffers.grads.mul_(coefficient)

    def look(self) -> Digest | None:
        """What this rank finds in its shard now, for its peers to compare; None if nothing is watched."""
        return self._guard.look(self.step, self.optimizers)

    def hear(self, digests: Mapping[int, Digest]) -> None:
        """Compares what all holders of this shard have found; called before the commit.

        Raises:
            CorruptedShardError: If this rank's shard is wrong, or nobody can tell whose is.
        """
        self._guard.hear(self.step, digests)

    def part_of_commit(self, stop: bool = False, save: bool = False) -> Tensor:
        """What this rank has to say in the commit. It takes a look at the whole gradient of the shard.

        Args:
            stop: Whether this rank was asked to stop.
            save: Whether it was asked to save.
        """
        return self._vector([] if self.manual else self.optimizers, stop, save)

    def commit(self, part: Tensor | None = None) -> Commit:
        """Agrees with all ranks that step t -> t+1 happens.

        Args:
            part: What `part_of_commit` has returned, if that was asked before.

        Raises:
            CollectiveError: If it did not come about here. Other ranks may have seen it succeed.
        """
        vector = self.part_of_commit() if part is None else part
        self.phase = StepPhase.ENTERED
        collectives.all_reduce(vector, self._groups, self._check)
        self.committed = Commit.of(vector.tolist())
        self.phase = StepPhase.COMMITTED
        return self.committed

    def update(self) -> None:
        """Applies the committed step to the own shard. Needs no other rank.

        Raises:
            CorruptedShardError: If the shard has changed since the commit was entered. It is not updated then.
        """
        if self.phase is not StepPhase.COMMITTED or self.committed is None:
            raise ProtocolError(f"An update needs a commit, but this rank is in {self.phase} of step {self.step}.")
        self._guard.check()
        with self._fence:
            if not self.manual:
                self.phase = StepPhase.UPDATING
                reach("update")
                self._update(self.optimizers, self.committed)
            self._guard.renew(self.step + 1, self.optimizers)
        self.step += 1
        self._backup = self._before_window = None
        self._idle()

    def step_one(self, optimizer: ShardedOptimizer) -> Commit:
        """One optimizer's step inside a batch, under manual optimization. Collective.

        Returns:
            What the ranks agreed on.
        """
        vector = self._vector([optimizer])
        # Whole gradients are the same on all ranks, but each looks for infinities in its own pieces only
        # (tests/sharding/test_gradients.py::an_infinity_in_one_rank_s_piece).
        if not self.whole_gradients or self.request.scale is not None:
            collectives.all_reduce(vector, self._groups, self._check)
        commit = Commit.of(vector.tolist())
        if self._backup is not None:
            self._backup.keep_shard()
        self.look()
        with self._fence:
            self.phase = StepPhase.UPDATING
            reach("update")
            self._adopt(optimizer.buffers)
            self._update([optimizer], commit)
            self._guard.renew(self.step, self.optimizers)
        self.gather([optimizer])
        if not self.whole_gradients:
            for buffers in optimizer.buffers:
                buffers.drop_gradients()
        self._idle()
        return commit

    def end_batch(self) -> None:
        """A training step under manual optimization is over; what it wrote to weights since its last update counts."""
        if self._is_written():
            if self._backup is not None:
                self._backup.keep_shard()
            with self._fence:
                self._adopt(self.buffers)

    def _adopt(self, written: Sequence[Buffers]) -> None:
        """Takes weights that user code has written to (as a WGAN clips them) into the shard."""
        self._reclaim()
        for buffers in written:
            buffers.reclaim()
            buffers.main_from_params()

    def gather(self, optimizers: Sequence[ShardedOptimizer] | None = None) -> None:
        """Rebuilds parameters from the shards. Collective."""
        self._map()
        gather_parameters(self._buffers_of(optimizers), self._groups, self._check, self.reducer.memory)

    def _reclaim(self) -> None:
        """Before ``main`` is written to: others may still be reading it."""
        if self.reducer.memory is not None:
            self.reducer.memory.reclaim()

    @property
    def window_is_open(self) -> bool:
        """Whether gradients of this rank alone wait for a later batch; only then a batch ends without a commit."""
        return bool(self.reducer.private)

    # After a fault (recovery.interface.Recoverable)

    @property
    def entered(self) -> bool:
        """Whether the shard's gradient of step t -> t+1 is complete, so that the update can be made without help."""
        return self.phase in (StepPhase.ENTERED, StepPhase.COMMITTED)

    @property
    def torn(self) -> bool:
        """Whether a fault came while the shard was changing, and there is no copy of it; or its bits are wrong."""
        backed = self._backup is not None and self._backup.whole
        return bool(self.corrupted) or (self.phase is StepPhase.UPDATING and not backed)

    @property
    def corrupted(self) -> str:
        """How the shard's bits were found to be wrong, until they are replaced; empty if they were not."""
        return self._guard.found

    @property
    def commit_vector(self) -> tuple[float, ...] | None:
        """The commit of step t -> t+1, if this rank saw it succeed."""
        return self.committed.vector if self.committed is not None else None

    def held(self) -> dict[str, Tensor]:
        """What the shard is and is made from: the flat buffers, the optimizers' state, room for what is received."""
        flat = ((name, getattr(buffers, name)) for buffers in self.buffers for name in ("params", "grads"))
        named = [*shard_tensors(self.optimizers), *flat, *(("bucket", room) for room in self.reducer.pool)]
        return {f"{name} ({number})": tensor for number, (name, tensor) in enumerate(named)}

    def lose(self) -> None:
        """Memory of something in `held` was hit: a peer gives the shard again, and a gather the parameters."""
        self.phase, self._backup, self._hit = StepPhase.UPDATING, None, True

    def roll_forward(self, vector: tuple[float, ...]) -> None:
        """Makes the update that another rank saw committed."""
        if not self.entered:
            raise ProtocolError(f"Rank in {self.phase} of step {self.step} cannot roll forward.")
        self.committed, self.phase = Commit.of(vector), StepPhase.COMMITTED
        self.update()

    def roll_back(self, kind: str) -> None:
        """Forgets the step under way: gradients, launches, the commit, and what a batch has already updated.

        Args:
            kind: "tail" if hooks of the step before are called again; what they did to weights is undone then.
        """
        self.reducer.reset()
        with self._fence:
            if self._backup is not None:
                self._backup.restore()
            if kind == "tail" and self._before_window is not None:
                for buffers, value in zip(self.buffers, self._before_window, strict=True):
                    buffers.main.copy_(value)
            if self._hit or not (self.manual or self._groups.on_host):
                for buffers in self.buffers:
                    buffers.grads.zero_()  # room that no gradient fills is counted too, and may hold anything now
        if not self.torn:
            self._idle()
        self._backup, self._before_window, self._hit = None, None, False
        self.follow_groups()
        if not self.manual:
            self.reducer.private.clear()
            for buffers in self.buffers:
                buffers.drop_gradients()

    def export_shard(self) -> tuple[dict[str, Any], list[Tensor]]:
        """The shard in few large messages: see `moving`.

        Raises:
            CorruptedShardError: If its bits are wrong.
        """
        self._guard.check(after_hooks=True)
        manifest, tensors = moving.export_shard(self.optimizers, with_gradients=self.manual)
        return {"step": self.step, **manifest}, tensors

    def import_shard(self, manifest: dict[str, Any], receive: Callable[[Tensor], None]) -> None:
        """Takes a peer's shard: ``receive`` fills one flat tensor after the other, as `export_shard` lists them."""
        self.phase = StepPhase.UPDATING  # torn until all of it is here
        for optimizer, layout in zip(self.optimizers, manifest["layouts"], strict=True):
            self._watch(*optimizer.follow_layout(layout))
        moving.import_shard(self.optimizers, manifest, receive)
        with self._fence:  # all of it is there when that is left
            self._guard.reset(manifest["step"], self.optimizers)
        self.step = manifest["step"]
        self._idle()

    def rebuild(self) -> None:
        """Gathers all parameters; heals whatever a half-done gather left. Collective."""
        self.gather()

    def release(self) -> None:
        """Training is over: parameters get memory of their own, hooks go."""
        for optimizer in self.optimizers:
            for buffers in optimizer.buffers:
                self.reducer.remove(buffers)
                buffers.release()
            optimizer.close()

    def _idle(self) -> None:
        self.phase, self.committed, self.request = StepPhase.IDLE, None, Request()

    def _buffers_of(self, optimizers: Sequence[ShardedOptimizer] | None) -> list[Buffers]:
        return [buffers for optimizer in optimizers or self.optimizers for buffers in optimizer.buffers]

    def _differentiable(self) -> list[Buffers]:
        """Buffers that backward may reach: a toggled-off optimizer's are not sent."""
        return [buffers for buffers in self.buffers if any(p.requires_grad for p in buffers.parameters)]

    def _expose(self, active: Sequence[Buffers]) -> None:
        self.reducer.finish(active)
        self.reducer.gather_gradients(active)
        present = [flag for buffers in active for flag in buffers.present()]
        vector = torch.tensor(usage.pack(present, self.grid.world_size), dtype=torch.float64)
        collectives.all_reduce(vector, self._groups, self._check)
        used = usage.unpack(vector.tolist(), len(present), self.grid.world_size)
        for buffers in active:
            buffers.show(used[: len(buffers.parameters)])
            used = used[len(buffers.parameters) :]

    def _vector(self, optimizers: Sequence[ShardedOptimizer], stop: bool = False, save: bool = False) -> Tensor:
        """This rank's part of the commit: its own pieces, so that R holders count once.

        Raises:
            CollectiveError: If what has made the gradient did not come about.
        """
        finish(self._check)
        buffers = self._buffers_of(optimizers) if optimizers else []
        own = [part for each in buffers for part in each.own_gradients()]
        present = [flag for each in buffers for flag in each.present()]
        used = tuple(usage.pack(present, self.grid.world_size))
        return torch.tensor(part_of_commit(own, self.request, used, stop, save).vector, dtype=torch.float64)

    def _update(self, optimizers: Sequence[ShardedOptimizer], commit: Commit) -> None:
        buffers = self._buffers_of(optimizers)
        used = usage.unpack(commit.used, sum(len(b.parameters) for b in buffers), self.grid.world_size)
        for each in buffers:
            each.used, used = used[: len(each.parameters)], used[len(each.parameters) :]
        self._reclaim()
        if commit.non_finite:  # as a GradScaler does: the step is counted, nothing is updated
            return
        for optimizer in optimizers:
            optimizer.update(partial(self.request.prepare, grad_norm_sq=commit.grad_norm_sq))
