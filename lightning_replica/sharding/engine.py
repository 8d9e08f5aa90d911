"""The engine: all that trainer, recovery and checkpoint may use of the sharded state.

An engine holds one rank's part of parameters, gradients and optimizers, and makes the step. `state.ShardedState` is the
engine of this package (ZeRO-1 with R holders of each shard). Another engine would be a folder beside `sharding` that
has a class with these methods. Code outside of `sharding` uses nothing else of it (tests/test_house.py).

[Note: the order of calls]
A step, on every rank:

    begin_window                       the first batch of the step is about to begin
      before_backward                  before each backward pass, of which there may be several
      after_backward                   after it
      unscale, clip                    where gradients are whole: the user's hooks see the result
    reduce                             the shard's averaged gradient is complete
    digest                             before the mirrors are sent
    part_of_commit, compare, commit    from here on the step may have happened on another rank
    update                             from here on it has happened here; needs no other rank
    gather                             collective

Under manual optimization `step_one` replaces the calls from reduce to gather, any number of times. `end_batch` follows
the last of them, and then the commit of the batch. `release` is the last call of all. A fault may come in any call.
Then the calls of `core.recoverable.Recoverable` follow, and after them `begin_window`, or the tail of the step.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_replica.core.digests import Digest
from lightning_replica.core.grid import Grid
from lightning_replica.core.inexact import Report, warn
from lightning_replica.core.pending_work import Check
from lightning_replica.core.recoverable import Recoverable
from lightning_replica.groups.membership import Groups
from lightning_replica.sharding.buffers import OF_PARAMETERS
from lightning_replica.sharding.carried import CARRIED_BYTES
from lightning_replica.sharding.commit import Commit, Flags, Request
from lightning_replica.sharding.layout import Partition
from lightning_replica.sharding.optimizer import ELEMENT_WISE
from lightning_replica.sharding.own_attributes import Watch, watch_of
from lightning_replica.sharding.settings import REDUCE_DTYPES, EngineSettings, ReduceDtype
from lightning_replica.sharding.state import ShardedState
from lightning_replica.sharding.whole import WholeOptimizer

__all__ = [
    "CARRIED_BYTES",
    "ELEMENT_WISE",
    "OF_PARAMETERS",
    "REDUCE_DTYPES",
    "Commit",
    "Engine",
    "EngineSettings",
    "Flags",
    "HeldPiece",
    "OptimizerShard",
    "Partition",
    "ReduceDtype",
    "Request",
    "WholeOptimizer",
    "Watch",
    "make_engine",
    "watch_of",
]


class HeldPiece(Protocol):
    """A part of a parameter in this rank's shard, for checkpoints."""

    @property
    def order(self) -> int:
        """Position of its parameter among all parameters of the module."""

    @property
    def rank(self) -> int:
        """The rank whose piece it is. Over all ranks, every element of every parameter lies in one piece."""

    @property
    def start(self) -> int:
        """Its first element, in the order in which the parameter's elements lie in memory."""

    @property
    def whole(self) -> nn.Parameter:
        """The module's parameter that this is a part of; `local_of` it is what the rank's grid has of a DTensor."""

    @property
    def parameter(self) -> nn.Parameter:
        """Its values as the optimizer updates them, in the shape and dtype of its optimizer state."""

    @property
    def value(self) -> Tensor:
        """Its values as forward reads them, of shape (numel,)."""

    @property
    def main(self) -> Tensor | None:
        """Its values in 32 bits where forward reads 16, of shape (numel,); None elsewhere."""

    @property
    def state(self) -> Mapping[str, Any] | None:
        """Its optimizer state; None if there is none yet."""

    def is_like(self, key: str, value: Any) -> bool:
        """Return whether an entry of an optimizer's state has one element for each element of the piece."""

    def split(self, whole: Tensor) -> Tensor:
        """Return the part of ``whole``, a tensor in the shape of the parameter, that belongs to this piece."""


class OptimizerShard(Protocol):
    """One of the user's optimizers, with the parameters and state that this rank holds, for checkpoints."""

    @property
    def optimizer(self) -> Optimizer:
        """The user's optimizer."""

    @property
    def pieces(self) -> Sequence[HeldPiece]:
        """The pieces that this rank holds."""

    def position(self, parameter: nn.Parameter) -> int:
        """Return the position of one of the module's parameters, in registration order."""

    def wholes(self) -> dict[int, Tensor]:
        """Return all whole parameters of this optimizer by position, as forward reads them."""

    def main_dtypes(self) -> dict[int, Any]:
        """Return the dtype of main parameters by position, where it is not the parameter's."""

    def forget_main(self) -> None:
        """Make every main parameter differ from its parameter. Called before parameters are read from a checkpoint."""

    def main_from_params(self) -> None:
        """Take the shard's values from the parameters where main parameters do not round to them.

        Called after parameters were read from a checkpoint.
        """

    def load_state(self, state: Mapping[int, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
        """Load state and hyperparameters through the optimizer's own ``load_state_dict``.

        Args:
            state: State by number of the piece.
            groups: Hyperparameters of every param group.
        """


class Engine(Recoverable, Protocol):
    """One rank's part of the sharded state. See [Note: the order of calls]."""

    @property
    def grid(self) -> Grid:
        """The table of the ranks among which the state is sharded; that of experts is another."""

    @property
    def rank(self) -> int:
        """This rank's number in the grid."""

    @property
    def settings(self) -> EngineSettings:
        """How the state is sharded."""

    # A fit, called by the trainer

    def connect(self, groups: Groups, check: Check) -> None:
        """Use these process groups from now on. Called when a fit begins, and in every recovery after a regroup.

        Args:
            groups: The groups of this generation.
            check: Raises once waiting has become pointless.
        """

    def return_to_update(self) -> None:
        """Make parameters and gradients what the last update has left: its hooks are called again. Collective."""

    def follow_groups(self) -> None:
        """Take in parameters that were added to a param group or unfrozen, and drop those that were removed.

        Called before a checkpoint is loaded. `begin_window` and `roll_back` do this themselves.
        """

    def release(self) -> None:
        """Give parameters memory of their own again, and optimizers their own methods. Called after training."""

    # A step, called by the trainer, in this order

    def begin_window(self, weights_may_differ: bool) -> None:
        """Begin a step. Called before its first batch.

        Args:
            weights_may_differ: Whether user code is known to write weights between steps, so that all are compared with
                the shard. Weights that it has written to are taken into the shard.
        """

    def adopt_written(self, certain: bool) -> None:
        """Take the weights that hooks of this step have written to into the shard. Called after the backward pass.

        Args:
            certain: Whether user code is known to write weights in a step, so that all are compared.
        """

    def average_over(self, ranks: int) -> None:
        """Divide sums of gradients by this number of ranks from now on; without a call, by all.

        Called before the backward passes of a step, with the same number on all ranks.
        """

    def before_backward(self, reduce: bool) -> None:
        """Prepare for a backward pass.

        Args:
            reduce: Whether the gradients of the pass are sent to the shards. Otherwise they only accumulate.
        """

    def after_backward(self, reduce: bool) -> None:
        """Make gradients whole where the settings say so; collective then. Called after every backward pass."""

    def unscale(self, optimizer: Optimizer, scale: float) -> None:
        """Divide an optimizer's whole gradient by the loss scale. Called where gradients are whole."""

    def clip(self, optimizer: Optimizer, limit: float) -> None:
        """Scale an optimizer's whole gradient to a global 2-norm of at most ``limit``. Collective.

        Called where gradients are whole. The norm has the bits of the one in the commit, so the result does not
        depend on whether user code looks at gradients.
        """

    def reduce(self) -> None:
        """Complete the shard's averaged gradient. Collective."""

    def digest(self) -> Digest | None:
        """Return the digest of this rank's shard, for its peers to compare; None if nothing is checked.

        Called before the commit, and once more at the end of a fit, where no commit follows.
        """

    def compare(self, digests: Mapping[int, Digest]) -> None:
        """Compare the digests of all holders of this shard.

        Args:
            digests: What `digest` has returned, by rank; that of this rank too.

        Raises:
            CorruptedShardError: If this rank's shard is wrong, or the digests do not show whose is.
        """

    def part_of_commit(self, request: Request, flags: Flags = Flags()) -> Tensor:  # noqa: B008
        """Return this rank's part of the commit.

        Args:
            request: How the gradient is scaled and clipped before the update.
            flags: What this rank says.
        """

    @property
    def results_lost(self) -> bool:
        """Whether what the attempt before has computed is lost: see `lose_results`; until `repeats_gradient`."""

    def repeats_gradient(self) -> bool:
        """Return whether the gradient has the bits that it had in the attempt at this step that a fault has ended.

        Called before the commit. True if that attempt had no whole gradient yet.
        """

    def commit(self, part: Tensor) -> Commit:
        """Agree with all ranks that step t -> t+1 happens. Collective.

        Args:
            part: What `part_of_commit` has returned.

        Raises:
            CollectiveError: If the commit failed on this rank. Other ranks may have seen it succeed.
        """

    def update(self) -> None:
        """Apply the committed step to the own shard. Needs no other rank.

        Raises:
            CorruptedShardError: If the shard has changed since the commit was entered. It is not updated then.
        """

    def gather(self) -> None:
        """Rebuild all parameters from the shards. Collective."""

    def step_one(self, optimizer: Optimizer, request: Request) -> Commit:
        """Make one optimizer's step inside a batch, under manual optimization, from reduction to gather. Collective.

        Returns:
            What the ranks agreed on.
        """

    def end_batch(self) -> None:
        """Take into the shard the weights that a manual training step has written to. Called before the commit."""

    @property
    def window_is_open(self) -> bool:
        """Whether unreduced gradients of this rank wait for a later batch; only then a batch ends without a commit."""

    # Called by the trainer, checkpoints, or tools, between steps

    def carried_gradients(self) -> dict[nn.Parameter, Tensor] | None:
        """Return the gradients, as of the window's begin, that a later step may add to or read; for checkpoints.

        Under manual optimization these are the gradients that are there, unless steps are known to remove them first.
        Under automatic optimization there are some only if `EngineSettings.keeps_gradients`. They are no copies. None
        if a fault of a device has hit the memory where they were.
        """

    def set_gradients(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """Give parameters what `carried_gradients` has returned, on the parameters' device."""

    @property
    def optimizers(self) -> Sequence[OptimizerShard]:
        """What checkpoints read and write: one entry for each of the user's optimizers, in their order."""

    @property
    def trained(self) -> list[nn.Parameter]:
        """All parameters that the shards hold."""

    def params_from_main(self) -> None:
        """Copy the own shard's values into the parameters; other values stay as they are. Called before a last save."""

    def shard(self) -> list[tuple[str, Tensor]]:
        """Return every tensor of the shard with its kind: "main", or the name of an optimizer's state."""

    def gather_optimizer(self, optimizer: Optimizer) -> WholeOptimizer:
        """Collect an optimizer's state. Collective over the first replica; other ranks need not call it.

        Returns:
            The whole state on rank 0, an empty one on the other ranks.
        """

    def own_attributes(self) -> list[dict[str, bytes]]:
        """Return what the user's optimizers keep in attributes of their own, packed."""

    def set_own_attributes(self, attributes: Sequence[Mapping[str, bytes]]) -> None:
        """Give the user's optimizers what `own_attributes` has returned."""

    def load_optimizer(self, number: int, saved: Mapping[str, Any], main: Mapping[int, Tensor] | None = None) -> None:
        """Load this rank's part of a state that `gather_optimizer`, or any unsharded optimizer, has written.

        The parameters must already hold the checkpoint's weights. Main parameters are used where they round to
        these weights.

        Args:
            number: Number of the optimizer.
            saved: The state, as ``torch.optim.Optimizer.state_dict`` returns it.
            main: Main parameters by position in the param groups.

        Raises:
            ConfigurationError: If ``saved`` holds no optimizer state, or that of other parameters.
        """


def make_engine(
    grids: Sequence[Grid],
    rank: int,
    parameters: Sequence[nn.Parameter],
    optimizers: Sequence[Optimizer],
    settings: EngineSettings,
    fence: AbstractContextManager[None] = nullcontext(),  # noqa: B008
    report: Report = warn,
) -> Engine:
    """Lay parameters out and shard optimizers. Needs no other rank.

    Args:
        grids: The grids that the rank is in; the second, if there is one, shards experts.
        rank: This rank.
        parameters: All parameters of the module, in registration order.
        optimizers: The user's optimizers.
        settings: How the state is sharded.
        fence: A context that is held while the shard, or a copy of it, is written: see `devices.interface.Device`.
        report: Called with what is not restored exactly.

    Raises:
        ConfigurationError: If there is nothing to train, or an optimizer cannot be sharded.
    """
    return ShardedState(grids, rank, parameters, optimizers, settings, fence, report)
