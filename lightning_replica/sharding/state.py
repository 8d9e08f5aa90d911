"""One rank's part in a step, from gradients to the gathered parameters, and in the recovery from a fault.

`engine` documents what each method does and when it is called.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_replica.core.digests import Digest, digest, words_of
from lightning_replica.core.grid import Grid
from lightning_replica.core.inexact import Report, warn
from lightning_replica.core.pending_work import Check, finish
from lightning_replica.core.points import reach
from lightning_replica.core.ranges import ranged
from lightning_replica.errors import ProtocolError
from lightning_replica.groups.membership import Groups
from lightning_replica.sharding import collectives, moving
from lightning_replica.sharding.backup import Backup, GradientCopy, present_in
from lightning_replica.sharding.buffers import Buffers
from lightning_replica.sharding.commit import Commit, Flags, Request, StepPhase, clip_coefficient
from lightning_replica.sharding.gathering import gather_parameters
from lightning_replica.sharding.gradients import Gradients
from lightning_replica.sharding.guard import Guard
from lightning_replica.sharding.listing import shard_tensors
from lightning_replica.sharding.optimizer import ShardedOptimizer, buffers_of, scale_gradients, shard_optimizers
from lightning_replica.sharding.own_attributes import attributes_of, set_attributes
from lightning_replica.sharding.settings import EngineSettings
from lightning_replica.sharding.user_writes import UserWrites
from lightning_replica.sharding.voting import vote
from lightning_replica.sharding.whole import WholeOptimizer, gather_optimizer, load_optimizer

log = logging.getLogger(__name__)


class ShardedState:
    """The sharded parameters, gradients and optimizers of one rank.

    Args:
        grids: The grids that the rank is in; the second, if there is one, shards experts.
        rank: This rank.
        parameters: All parameters of the module, in registration order.
        optimizers: The user's optimizers.
        settings: How the state is sharded.
        fence: A context that is held while the shard, or a copy of it, is written: see `devices.interface.Device`.

    Attributes:
        step: Number of steps applied to this rank's shard, t.
        phase: How far the step t -> t+1 has come.
        committed: The commit of step t -> t+1, from COMMITTED on.
        settings: How the state is sharded.
    """

    def __init__(
        self,
        grids: Sequence[Grid],
        rank: int,
        parameters: Sequence[nn.Parameter],
        optimizers: Sequence[Optimizer],
        settings: EngineSettings,
        fence: AbstractContextManager[None] = nullcontext(),  # noqa: B008
        report: Report = warn,
    ) -> None:
        grid = grids[0]
        if grid.size == 1:
            settings = replace(settings, shared_memory=False)
        self.grid, self.rank, self.settings, self._fence = grid, rank, settings, fence
        self._guard = Guard(settings.guard if settings.recoverable else "off", rank, grid.shard_of(rank))
        self.optimizers = shard_optimizers(optimizers, parameters, grids, rank, settings)
        self.gradients = Gradients(grids, self.optimizers, settings)
        self.step, self.phase = 0, StepPhase.IDLE
        self.committed: Commit | None = None
        self._request = Request()
        self._backup: Backup | None = None
        # Gradients at the window's begin, and after the last update. The latter are kept where user code may look.
        self._gradients_before: GradientCopy | None = None
        self._gradients_after: GradientCopy | None = None
        self._writes, self._report = UserWrites(report), report
        # Values of the shard before weights were taken into it, between two steps and in a step.
        self._before_window: list[Tensor] | None = None
        self._before_hooks: list[Tensor] | None = None
        self.results_lost = False
        self._is_new = True  # has made no update, as a replacement
        self._attempt: tuple[int, list[int]] | None = None  # a step whose commit failed, and digests of its gradient
        self._gradients_lost = False
        self._memory_lost = False  # a fault hit memory of the device, which may hold anything now

    @property
    def buffers(self) -> list[Buffers]:
        """All flat buffers."""
        return buffers_of(self.optimizers)

    def connect(self, groups: Groups, check: Check) -> None:
        """Use ``groups`` from now on."""
        self._groups, self._check = groups, check
        self.gradients.connect(groups, check)

    def follow_groups(self) -> None:
        """Take in parameters that were added to a param group or unfrozen, and drop those that were removed."""
        for optimizer in self.optimizers:
            new, gone = optimizer.follow_groups()
            self.gradients.watch(new, gone)

    # A step, in the order of calls

    @ranged("begin_window")
    def begin_window(self, weights_may_differ: bool) -> None:
        """Begin a step."""
        self.follow_groups()
        self._before_window = None
        self.gradients.map_memory()
        for buffers in self.buffers:
            buffers.zero_accumulated(set_to_none=True)  # user code may have set every `.grad` to None by itself
        self._guard.begin_window()
        self._before_hooks = None
        # A part is compared once a step, after the hooks.
        if self._writes.found(self.buffers, self.step, weights_may_differ, in_part=False):
            self._before_window = self._main()
            self._adopt(self.buffers)
        self._guard.keep(self.step, self.optimizers)
        self._backup = (
            Backup(self.optimizers, self._fence) if self.settings.manual and self.settings.recoverable else None
        )
        self._gradients_before = self._gradients_now()
        for buffers in self.buffers if self.settings.manual else ():
            buffers.carried.begin_window(buffers.present())

    def _gradients_now(self) -> GradientCopy | None:
        """Return a copy of the gradients that the window begins with, if they may be needed again."""
        settings, after = self.settings, self._gradients_after
        if not settings.recoverable or not (settings.manual or settings.keeps_gradients):
            return None
        if after is not None and after.holds(self.buffers):
            return after
        return GradientCopy(self.buffers, self._fence, at_once=settings.keeps_gradients)

    def adopt_written(self, certain: bool) -> None:
        """Take the weights that hooks of this step have written to into the shard.

        Args:
            certain: Whether user code is known to write weights in a step, so that all are compared.
        """
        if self._writes.found(self.buffers, self.step, certain):
            self._before_hooks = self._main()
            self._adopt(self.buffers)

    def _main(self) -> list[Tensor] | None:
        """Return a copy of the shard's values, if they may be needed again."""
        if not self.settings.recoverable:
            return None
        with self._fence:
            return [buffers.main.clone() for buffers in self.buffers]

    def average_over(self, ranks: int) -> None:
        """Divide sums of gradients by this number of ranks from now on."""
        self.gradients.average_over(ranks)

    def before_backward(self, reduce: bool) -> None:
        """Prepare for a backward pass; without ``reduce`` its gradients only accumulate."""
        self.gradients.before_backward(reduce, self._gradients_before)

    def after_backward(self, reduce: bool) -> None:
        """Make gradients whole after a backward pass, where the settings say so."""
        self.gradients.after_backward(reduce)

    def unscale(self, optimizer: Optimizer, scale: float) -> None:
        """Divide an optimizer's whole gradient by the loss scale."""
        scale_gradients(self._sharded(optimizer), 1.0 / scale)

    def clip(self, optimizer: Optimizer, limit: float) -> None:
        """Scale an optimizer's whole gradient to a global 2-norm of at most ``limit``. Collective."""
        sharded = self._sharded(optimizer)
        self.gradients.attach([sharded])
        vector = self._vector([sharded])
        collectives.all_reduce(vector, self._groups.world, self._check)
        coefficient = clip_coefficient(limit, math.sqrt(float(vector[0])))
        if coefficient != 1.0:
            scale_gradients(sharded, coefficient)

    def reduce(self) -> None:
        """Complete the shard's averaged gradient."""
        self.gradients.reduce(self.optimizers, self._gradients_before)

    @ranged("digest")
    def digest(self) -> Digest | None:
        """Return the digest of this rank's shard, for its peers to compare; None if nothing is checked."""
        return self._guard.digest(self.step, self.optimizers)

    def compare(self, digests: Mapping[int, Digest]) -> None:
        """Compare the digests of all holders of this shard."""
        self._guard.compare(self.step, digests)

    def part_of_commit(self, request: Request, flags: Flags = Flags()) -> Tensor:  # noqa: B008
        """Return this rank's part of the commit, computed from the gradient of the rank's own pieces."""
        self._request = request
        return self._vector([] if self.settings.manual else self.optimizers, flags)

    def repeats_gradient(self) -> bool:
        """Return whether the gradient has the bits that it had in the attempt at this step that a fault has ended."""
        attempt, self._attempt, self.results_lost = self._attempt, None, False
        return attempt is None or attempt[0] != self.step or attempt[1] == self._gradient_digests()

    def _gradient_digests(self) -> list[int]:
        parts = [part for buffers in self.buffers for part in buffers.own_gradients() if part.numel()]
        return [digest(part, 0, words_of(part)) for part in parts]

    @ranged("commit")
    def commit(self, part: Tensor) -> Commit:
        """Agree with all ranks that step t -> t+1 happens. ``part`` is overwritten."""
        self.phase = StepPhase.ENTERED
        collectives.all_reduce(part, self._groups.world, self._check)
        self.committed = Commit.of(part.tolist(), self.settings.counts_zeros)
        self.phase = StepPhase.COMMITTED
        return self.committed

    @ranged("update")
    def update(self) -> None:
        """Apply the committed step to the own shard. Needs no other rank.

        Raises:
            CorruptedShardError: If the shard has changed since the commit was entered. It is not updated then.
        """
        if self.phase is not StepPhase.COMMITTED or self.committed is None:
            raise ProtocolError(f"An update needs a commit, but this rank is in {self.phase} of step {self.step}.")
        self._guard.check()
        with self._fence:
            if not self.settings.manual:
                self.phase = StepPhase.UPDATING
                reach("update")
                self._update(self.optimizers, self.committed)
            self._guard.renew(self.step + 1, self.optimizers)
        self._keep_gradients()
        self._report_updates()
        self.step, self._is_new = self.step + 1, False
        self._backup = self._before_window = self._before_hooks = self._gradients_before = None
        self._idle()

    def _report_updates(self) -> None:
        """Report what updates have written to optimizers and what can be neither sent nor saved."""
        for number, optimizer in enumerate(self.optimizers):
            for name in optimizer.lost_attributes():
                why = "updates change it, and it is no plain data: neither a replacement nor a checkpoint has it"
                self._report(f"optimizer {number}.{name}", why, "replacement")
            for name in optimizer.unseen_attributes():
                why = "it has so many items that what code outside of updates changes may not be seen, and not go back"
                self._report(f"optimizer {number}.{name}", why, "unknown")

    def _keep_gradients(self) -> None:
        """Copy the gradients that the hooks after an update find, if user code may look at them."""
        if self.settings.keeps_gradients and self.settings.recoverable:
            self._gradients_after = GradientCopy(self.buffers, self._fence, at_once=True)

    @ranged("step_one")
    def step_one(self, optimizer: Optimizer, request: Request) -> Commit:
        """Make one optimizer's step inside a batch, under manual optimization, from reduction to gather. Collective.

        Returns:
            What the ranks agreed on.
        """
        sharded = self._sharded(optimizer)
        self._request = request
        for buffers in sharded.buffers:
            buffers.carried.step(buffers.present())
        self.gradients.reduce([sharded], self._gradients_before)
        vector = self._vector([sharded])
        # Whole gradients are the same on all ranks, but each rank looks for infinities in its own pieces only
        # (tests/sharding/test_manual.py::an_infinity_in_one_rank_s_piece).
        if not self.settings.whole_gradients or request.scale is not None:
            collectives.all_reduce(vector, self._groups.world, self._check)
        commit = Commit.of(vector.tolist(), self.settings.counts_zeros)
        if self._backup is not None:
            self._backup.keep()
        self._adopt(sharded.buffers)
        with self._fence:
            self.phase = StepPhase.UPDATING
            reach("update")
            self._update([sharded], commit)
            self._guard.renew(self.step, self.optimizers)
        self._gather([sharded])
        if not self.settings.whole_gradients:
            sharded.drop_gradients()
        self._idle()
        return commit

    def end_batch(self) -> None:
        """Take into the shard the weights that a manual training step has written to since its last update."""
        if self._writes.found(self.buffers, self.step, certain=True):
            if self._backup is not None:
                self._backup.keep()
            self._adopt(self.buffers)

    def _adopt(self, written: Sequence[Buffers]) -> None:
        """Take weights that user code has written to (as a WGAN clips them) into the shard."""
        self._guard.adopt(self.step, self.optimizers)
        with self._fence:
            self.gradients.reclaim()
            for buffers in written:
                buffers.reclaim()
                buffers.main_from_params()

    def gather(self) -> None:
        """Rebuild parameters from the shards. Collective."""
        self._gather(self.optimizers)

    @ranged("gather")
    def _gather(self, optimizers: Sequence[ShardedOptimizer]) -> None:
        self.gradients.map_memory()
        for way in self.gradients.ways(buffers_of(optimizers)):
            gather_parameters(way.active, way.groups, self._check, way.reducer.memory)

    @property
    def window_is_open(self) -> bool:
        """Whether unreduced gradients of this rank wait for a later batch; only then a batch ends without a commit."""
        return self.gradients.pending

    def carried_gradients(self) -> dict[nn.Parameter, Tensor] | None:
        """Return the gradients, as of the window's begin, that code may read or add to in a later step; not copies.

        None if a fault of a device has hit the memory where they were.
        """
        settings, before = self.settings, self._gradients_before
        if not settings.whole_gradients or not (settings.manual or settings.keeps_gradients):
            return {}
        if self._gradients_lost:
            return None
        found: dict[nn.Parameter, Tensor] = {}
        for buffers in self.buffers:
            if settings.keeps_gradients or buffers.carried.may_be_needed:
                found |= present_in(buffers, buffers.present()) if before is None else before.of(buffers)
        return found

    def set_gradients(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """Give parameters what `carried_gradients` has returned."""
        with self._fence:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
            for buffers in self.buffers:
                buffers.attach_all()
                buffers.carried.is_used |= any(buffers.present())

    # After a fault (core.recoverable.Recoverable)

    @property
    def entered(self) -> bool:
        """Whether the shard's gradient of step t -> t+1 is complete, so that the update needs no other rank."""
        return self.phase in (StepPhase.ENTERED, StepPhase.COMMITTED)

    @property
    def intact(self) -> bool:
        """Whether the shard is whole: no bits were found to be wrong, and no fault came while the shard was changing.

        If there is a copy of the shard, it may have been changing.
        """
        backed = self._backup is not None and self._backup.whole
        return not self.corrupted and (self.phase is not StepPhase.UPDATING or backed)

    @property
    def corrupted(self) -> str:
        """How the shard's bits were found to be wrong, until they are replaced; empty if they were not."""
        return self._guard.found

    @property
    def commit_vector(self) -> tuple[float, ...] | None:
        """The commit of step t -> t+1, if this rank saw it succeed."""
        return self.committed.vector if self.committed is not None else None

    def held(self) -> dict[str, Tensor]:
        """Return by name the tensors of the shard and those that it is made from: flat buffers, receive buffers."""
        flat = ((name, getattr(buffers, name)) for buffers in self.buffers for name in ("params", "grads"))
        named = [*shard_tensors(self.optimizers), *flat, *(("bucket", room) for room in self.gradients.receive_buffers)]
        return {f"{name} ({number})": tensor for number, (name, tensor) in enumerate(named)}

    def lose(self) -> None:
        """Mark the shard as lost: memory in `held` was hit. A peer sends it again, a gather rebuilds parameters."""
        self.phase, self._backup, self._memory_lost = StepPhase.UPDATING, None, True
        self._gradients_before = self._gradients_after = None
        self._gradients_lost = True

    def lose_results(self) -> None:
        """Mark what the step under way has computed as lost, so that no attempt that follows is compared with it."""
        self.results_lost = True

    def roll_forward(self, vector: tuple[float, ...]) -> None:
        """Make the update whose commit another rank saw succeed."""
        if not self.entered:
            raise ProtocolError(f"Rank in {self.phase} of step {self.step} cannot roll forward.")
        self.committed, self.phase = Commit.of(vector, self.settings.counts_zeros), StepPhase.COMMITTED
        self.update()

    def roll_back(self, kind: str) -> None:
        """Discard the step under way: gradients, launches, the commit, and what a batch has already updated.

        Args:
            kind: "tail" if hooks of the step before are called again. What they did to weights is then undone.
        """
        if self.phase is StepPhase.ENTERED and not self.settings.manual and not self.results_lost:
            self._attempt = self.step, self._gradient_digests()
        self.gradients.reset()
        with self._fence:
            if self._backup is not None:
                self._backup.restore()
                for name in self._backup.not_restored:
                    why = "it is no plain data, and does not go back with a batch that is done again"
                    self._report(name, why, "unknown")
            for values in (self._before_hooks, self._before_window if kind == "tail" else None):
                for buffers, value in zip(self.buffers, values, strict=True) if values is not None else ():
                    buffers.main.copy_(value)
            if self._memory_lost or not (self.settings.manual or self._groups.on_host):
                for buffers in self.buffers:
                    buffers.grads.zero_()  # elements without gradient count too, and may hold anything now
        if self.intact:
            self._idle()
        self._backup = self._before_window = self._before_hooks = None
        self._memory_lost = False
        self.follow_groups()
        if not self.settings.manual:
            self.gradients.drop()
        kept = self._gradients_after if kind == "tail" else None
        self._return_gradients(self._gradients_before if kept is None else kept)
        self._gradients_before = None

    def _return_gradients(self, kept: GradientCopy | None) -> None:
        if kept is None:
            return
        with self._fence:
            kept.restore()
        if not kept.is_of(self.buffers):
            why = "parameters were added to the optimizer, or removed, since the update whose hooks are called again"
            self._report("gradients", why, "unknown")

    def export_shard(self) -> tuple[dict[str, Any], list[Tensor]]:
        """Return the shard as few large messages: see `moving`.

        Raises:
            CorruptedShardError: If its bits are wrong.
        """
        self._guard.check(after_hooks=True)
        with_gradients = self.settings.manual or self.settings.keeps_gradients
        manifest, tensors = moving.export_shard(self.optimizers, with_gradients)
        return {"step": self.step, **manifest}, tensors

    def import_shard(self, manifest: dict[str, Any], receive: Callable[[Tensor], None]) -> None:
        """Take a peer's shard: ``receive`` fills one flat tensor after the other, as `export_shard` lists them."""
        self.phase = StepPhase.UPDATING  # not intact until all of it has arrived
        for optimizer, layout in zip(self.optimizers, manifest["layouts"], strict=True):
            self.gradients.watch(*optimizer.follow_layout(layout))
        moving.import_shard(self.optimizers, manifest, receive)
        self._gradients_lost = False
        if self._is_new:
            self._report_attributes(manifest)
        self._is_new = False
        with self._fence:  # all of it has arrived when the fence is left
            self._guard.reset(manifest["step"], self.optimizers)
        self._keep_gradients()
        self.step = manifest["step"]
        self._idle()

    def _report_attributes(self, manifest: dict[str, Any]) -> None:
        for number, (_, left) in enumerate(manifest["attributes"]):
            for name in left:
                why = "it is no plain data, so a replacement has what its script gives it"
                self._report(f"optimizer {number}.{name}", why, "unknown")

    def rebuild(self) -> None:
        """Gather all parameters, which also repairs what a half-done gather left. Collective."""
        for buffers in self.buffers:
            buffers.retake()
        self.gather()

    def return_to_update(self) -> None:
        """Make parameters and gradients what the last update has left. Collective."""
        self.rebuild()
        self._return_gradients(self._gradients_after)

    # Between steps

    @property
    def trained(self) -> list[nn.Parameter]:
        """All parameters that the shards hold."""
        return [parameter for buffers in self.buffers for parameter in buffers.parameters]

    def params_from_main(self) -> None:
        """Copy the own shard's values into the parameters."""
        for buffers in self.buffers:
            buffers.retake()
            buffers.params_from_main()

    def shard(self) -> list[tuple[str, Tensor]]:
        """Return every tensor of the shard with its kind."""
        return list(shard_tensors(self.optimizers))

    def gather_optimizer(self, optimizer: Optimizer) -> WholeOptimizer:
        """Collect an optimizer's state. Collective over the first replica."""
        return gather_optimizer(self._sharded(optimizer), self._groups, self._check)

    def own_attributes(self) -> list[dict[str, bytes]]:
        """Return what the user's optimizers keep in attributes of their own, packed."""
        return [attributes_of(optimizer.optimizer).packed for optimizer in self.optimizers]

    def set_own_attributes(self, attributes: Sequence[Mapping[str, bytes]]) -> None:
        """Give the user's optimizers what `own_attributes` has returned."""
        for optimizer, each in zip(self.optimizers, attributes, strict=False):
            set_attributes(optimizer.optimizer, each)

    def load_optimizer(self, number: int, saved: Mapping[str, Any], main: Mapping[int, Tensor] | None = None) -> None:
        """Load this rank's part of a whole state."""
        load_optimizer(self.optimizers[number], saved, main)

    def release(self) -> None:
        """Give parameters memory of their own again, and remove all hooks. Called after training."""
        self.gradients.release()
        self._gradients_before = self._gradients_after = None
        for optimizer in self.optimizers:
            for buffers in optimizer.buffers:
                buffers.release()
            optimizer.close()

    def _idle(self) -> None:
        self.phase, self.committed, self._request = StepPhase.IDLE, None, Request()

    def _sharded(self, optimizer: Optimizer) -> ShardedOptimizer:
        return next(sharded for sharded in self.optimizers if sharded.optimizer is optimizer)

    def _vector(self, optimizers: Sequence[ShardedOptimizer], flags: Flags = Flags()) -> Tensor:  # noqa: B008
        """Return this rank's part of the commit.

        Raises:
            CollectiveError: If a collective that made the gradient has failed.
        """
        finish(self._check)
        used = self.gradients.present(optimizers)
        return vote(buffers_of(optimizers), used, self._request, flags, self.settings.counts_zeros)

    def _update(self, optimizers: Sequence[ShardedOptimizer], commit: Commit) -> None:
        self.gradients.take_used(optimizers, commit)
        self.gradients.reclaim()
        if commit.non_finite:  # as a GradScaler does: the step is counted, nothing is updated
            return
        for optimizer in optimizers:
            optimizer.update(partial(self._request.prepare, grad_norm_sq=commit.grad_norm_sq))
