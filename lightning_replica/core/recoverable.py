"""What recovery requires of the training that it recovers."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, TypeAlias

from torch import Tensor

from lightning_replica.core.plain import Pieces

Kind: TypeAlias = Literal["batch", "tail"]
"""Where training resumes: at the start of a batch window, or in the tail of the step before it.

See docs/life_of_a_step.md, "The two snapshots".
"""


class Recoverable(Protocol):
    """The sharded state of one rank. `sharding.state.ShardedState` implements it."""

    @property
    def step(self) -> int:
        """Updates applied to this rank's shard."""

    @property
    def entered(self) -> bool:
        """Whether this rank could make the next update without any other rank."""

    @property
    def intact(self) -> bool:
        """Whether the shard's memory can be trusted."""

    @property
    def corrupted(self) -> str:
        """How the shard's bits were found to be wrong, in which case ``intact`` is false; empty if they were not."""

    @property
    def commit_vector(self) -> tuple[float, ...] | None:
        """The commit of ``step -> step + 1``, if this rank saw it succeed."""

    def held(self) -> Mapping[str, Tensor]:
        """Return, by name, the tensors of the shard and those it is made from: a peer or a gather can restore them."""

    def lose(self) -> None:
        """Mark the shard as lost until a peer's is taken, because memory of a tensor in `held` was hit."""

    def lose_results(self) -> None:
        """Mark what the step under way has computed as lost: a stopped device may hold anything in its place."""

    def roll_forward(self, vector: tuple[float, ...]) -> None:
        """Make the committed update. Called only if ``entered`` is true.

        Raises:
            CorruptedShardError: If the shard's bits are found to be wrong.
        """

    def roll_back(self, kind: Kind) -> None:
        """Discard the step under way.

        Called on every rank, after any rolling forward and `HostState.restore_groups`.
        """

    def export_shard(self) -> tuple[dict[str, Any], list[Tensor]]:
        """Return a description of the shard in plain data, and the flat tensors that hold the shard.

        Raises:
            CorruptedShardError: If the shard's bits are found to be wrong.
        """

    def import_shard(self, manifest: dict[str, Any], receive: Callable[[Tensor], None]) -> None:
        """Take a peer's shard. If this raises half-way, ``intact`` is false."""

    def rebuild(self) -> None:
        """Rebuild the parameters from the shards. Collective."""


class HostState(Protocol):
    """The state of one rank outside the shard: loops, schedulers, metrics, random numbers, data position."""

    def held(self, kind: Kind) -> tuple[int, ...]:
        """Return the steps of the snapshots of ``kind`` that this rank holds."""

    def export(self, kind: Kind, step: int) -> bytes:
        """Return the part of a snapshot that is the same on all ranks."""

    def settings(self, step: int) -> dict[str, str]:
        """Return the settings that decide how the update to ``step`` is made, by name; the same on all ranks.

        Each value is a short text.
        """

    @property
    def settings_advice(self) -> str:
        """Advice for the user if the settings of ranks differ."""

    def private(self, kind: Kind, step: int) -> Pieces:
        """Return the part of a snapshot that belongs to this rank alone, as it is mirrored to the peers, packed."""

    def adopt(self, kind: Kind, step: int, replicated: bytes, private: bytes) -> None:
        """Take another rank's snapshot as this rank's own. Called on a replacement."""

    def restore_groups(self, kind: Kind, step: int) -> None:
        """Restore what decides which parameters are trained, before shards move. Drop all other snapshots.

        From here on, shards match only this snapshot. If a fault comes before `restore`, the next plan must not choose
        another one.
        """

    def restore(self, kind: Kind, step: int) -> None:
        """Restore this rank to a snapshot. Training resumes from there."""
