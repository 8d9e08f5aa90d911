"""What recovery asks of the training that it saves."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, TypeAlias

from torch import Tensor

Kind: TypeAlias = Literal["batch", "tail"]
"""Where training goes on: at the start of a batch window, or in the tail of the step before it.

See docs/life_of_a_step.md, "The two snapshots".
"""


class Recoverable(Protocol):
    """The sharded state of one rank. `sharding.state.ShardedState` is one."""

    @property
    def step(self) -> int:
        """Updates applied to the own shard."""

    @property
    def entered(self) -> bool:
        """Whether the next update could be made without any other rank."""

    @property
    def torn(self) -> bool:
        """Whether the shard's memory cannot be trusted."""

    @property
    def corrupted(self) -> str:
        """How the shard's bits were found to be wrong; empty if they were not. ``torn`` is true then."""

    @property
    def commit_vector(self) -> tuple[float, ...] | None:
        """The commit of ``step -> step + 1``, if this rank saw it succeed."""

    def held(self) -> Mapping[str, Tensor]:
        """What the shard is and is made from, by name: what a peer or a gather can give again."""

    def lose(self) -> None:
        """Memory of something in `held` was hit. The shard is ``torn`` from now on, until a peer's is taken."""

    def roll_forward(self, vector: tuple[float, ...]) -> None:
        """Makes the committed update. Called only where ``entered``.

        Raises:
            CorruptedShardError: If the shard's bits are found to be wrong.
        """

    def roll_back(self, kind: Kind) -> None:
        """Forgets the step under way. Called on every rank, after any rolling forward and `Host.restore_groups`."""

    def export_shard(self) -> tuple[dict[str, Any], list[Tensor]]:
        """Describes the shard in plain data and lists the flat tensors that hold it.

        Raises:
            CorruptedShardError: If the shard's bits are found to be wrong.
        """

    def import_shard(self, manifest: dict[str, Any], receive: Callable[[Tensor], None]) -> None:
        """Takes a peer's shard. If it raises half-way, ``torn`` is true."""

    def rebuild(self) -> None:
        """Rebuilds the parameters from the shards. Collective."""


class Host(Protocol):
    """The state of one rank that is not the shard: loops, schedulers, metrics, random numbers, data position."""

    def held(self, kind: Kind) -> tuple[int, ...]:
        """The steps of the snapshots of ``kind`` that this rank holds."""

    def export(self, kind: Kind, step: int) -> bytes:
        """The part of a snapshot that is the same on all ranks."""

    def settings(self, step: int) -> dict[str, str]:
        """What decides how the update to ``step`` is made, by name, as short text; the same on all ranks."""

    @property
    def settings_advice(self) -> str:
        """What to do where ranks' settings differ."""

    def private(self, kind: Kind, step: int) -> bytes:
        """The part that belongs to this rank alone, as it is mirrored to the peers."""

    def adopt(self, kind: Kind, step: int, replicated: bytes, private: bytes) -> None:
        """Takes another rank's snapshot as its own. Called on a replacement."""

    def restore_groups(self, kind: Kind, step: int) -> None:
        """Puts back what decides which parameters are trained, before shards move; drops all other snapshots.

        From here on there is no other way: shards are now as this snapshot wants them, so should a fault come before
        `restore`, the next plan must not choose another.
        """

    def restore(self, kind: Kind, step: int) -> None:
        """Puts this rank back to a snapshot; training goes on from there."""
