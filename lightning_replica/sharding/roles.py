"""What an engine can do, by who uses it. `engine` says what an engine is, and makes the one of this package."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_replica.core.digests import Digest
from lightning_replica.core.grid import Grid
from lightning_replica.core.pending_work import Check
from lightning_replica.core.recoverable import Recoverable
from lightning_replica.groups.membership import Groups
from lightning_replica.sharding.commit import Commit, Flags, Request
from lightning_replica.sharding.settings import EngineSettings
from lightning_replica.sharding.whole import WholeOptimizer


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


class InGrid(Protocol):
    """A part of the state in a grid of ranks."""

    @property
    def rank(self) -> int:
        """This rank's number in the grid."""

    @property
    def grid(self) -> Grid:
        """The table of the ranks among which the state is sharded; that of experts is another."""

    @property
    def settings(self) -> EngineSettings:
        """How the state is sharded."""


class Steppable(Protocol):
    """Makes a step, by these calls in this order. See [Note: the order of calls] in `engine`."""

    def begin_window(self, weights_may_differ: bool) -> None:
        """Begin a step. Called before its first batch.

        Args:
            weights_may_differ: Whether user code is known to write weights between steps, so that all are compared with
                the shard. Weights that it has written to are taken into the shard.
        """

    def before_backward(self, reduce: bool) -> None:
        """Prepare for a backward pass.

        Args:
            reduce: Whether the gradients of the pass are sent to the shards. Otherwise they only accumulate.
        """

    def after_backward(self, reduce: bool) -> None:
        """Make gradients whole where the settings say so; collective then. Called after every backward pass."""

    def reduce(self) -> None:
        """Complete the shard's averaged gradient. Collective."""

    def part_of_commit(self, request: Request, flags: Flags = Flags()) -> Tensor:  # noqa: B008
        """Return this rank's part of the commit.

        Args:
            request: How the gradient is scaled and clipped before the update.
            flags: What this rank says.
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


class ManualSteps(Protocol):
    """Makes several updates in one batch, under manual optimization."""

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


class Adjustable(Protocol):
    """Changes gradients and weights inside of a step, for user code, for ranks that join and after a resume."""

    def adopt_written(self, certain: bool) -> None:
        """Take the weights that hooks of this step have written to into the shard. Called after the backward pass.

        Args:
            certain: Whether user code is known to write weights in a step, so that all are compared.
        """

    def average_over(self, ranks: int) -> None:
        """Divide sums of gradients by this number of ranks from now on; without a call, by all.

        Called before the backward passes of a step, with the same number on all ranks.
        """

    def unscale(self, optimizer: Optimizer, scale: float) -> None:
        """Divide an optimizer's whole gradient by the loss scale. Called where gradients are whole."""

    def clip(self, optimizer: Optimizer, limit: float) -> None:
        """Scale an optimizer's whole gradient to a global 2-norm of at most ``limit``. Collective.

        Called where gradients are whole. The norm has the bits of the one in the commit, so the result does not
        depend on whether user code looks at gradients.
        """

    def return_to_update(self) -> None:
        """Make parameters and gradients what the last update has left: its hooks are called again. Collective."""

    def carried_gradients(self) -> dict[nn.Parameter, Tensor] | None:
        """Return the gradients, as of the window's begin, that a later step may add to or read; for checkpoints.

        Under manual optimization these are the gradients that are there, unless steps are known to remove them first.
        Under automatic optimization there are some only if `EngineSettings.keeps_gradients`. They are no copies. None
        if a fault of a device has hit the memory where they were.
        """

    def set_gradients(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """Give parameters what `carried_gradients` has returned, on the parameters' device."""


class Guarded(Protocol):
    """Finds bits that have changed by themselves, and results that differ when a step is made again."""

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

    @property
    def results_lost(self) -> bool:
        """Whether what the attempt before has computed is lost: see `lose_results`; until `repeats_gradient`."""

    def repeats_gradient(self) -> bool:
        """Return whether the gradient has the bits that it had in the attempt at this step that a fault has ended.

        Called before the commit. True if that attempt had no whole gradient yet.
        """

    def shard(self) -> list[tuple[str, Tensor]]:
        """Return every tensor of the shard with its kind: "main", or the name of an optimizer's state."""


class Checkpointable(InGrid, Protocol):
    """Gives and takes what checkpoints hold. Called between steps."""

    @property
    def optimizers(self) -> Sequence[OptimizerShard]:
        """What checkpoints read and write: one entry for each of the user's optimizers, in their order."""

    @property
    def trained(self) -> list[nn.Parameter]:
        """All parameters that the shards hold."""

    def params_from_main(self) -> None:
        """Copy the own shard's values into the parameters; other values stay as they are. Called before a last save."""

    def gather_optimizer(self, optimizer: Optimizer) -> WholeOptimizer:
        """Collect an optimizer's state. Collective over the first replica; other ranks need not call it.

        Returns:
            The whole state on rank 0, an empty one on the other ranks.
        """

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

    def own_attributes(self) -> list[dict[str, bytes]]:
        """Return what the user's optimizers keep in attributes of their own, packed."""

    def set_own_attributes(self, attributes: Sequence[Mapping[str, bytes]]) -> None:
        """Give the user's optimizers what `own_attributes` has returned."""


class Engine(Steppable, ManualSteps, Adjustable, Guarded, Checkpointable, Recoverable, Protocol):
    """One rank's part of the sharded state, from the beginning of a fit to its end."""

    def connect(self, groups: Groups, check: Check) -> None:
        """Use these process groups from now on. Called when a fit begins, and in every recovery after a regroup.

        Args:
            groups: The groups of this generation.
            check: Raises once waiting has become pointless.
        """

    def follow_groups(self) -> None:
        """Take in parameters that were added to a param group or unfrozen, and drop those that were removed.

        Called before a checkpoint is loaded. `begin_window` and `roll_back` do this themselves.
        """

    def release(self) -> None:
        """Give parameters memory of their own again, and optimizers their own methods. Called after training."""
