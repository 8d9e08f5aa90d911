"""What a hook is told of the recovery under way."""

from dataclasses import dataclass

from lightning_replica.points import PhaseName
from lightning_replica.recovery.faults import Fault
from lightning_replica.recovery.interface import Kind
from lightning_replica.recovery.planner import Move


@dataclass(frozen=True)
class RecoveryContext:
    """What is known in one phase of a recovery. From "regroup" on it is the same on every rank, but for ``rank``.

    Attributes:
        phase: The phase.
        rank: This rank.
        world_size: Number of ranks.
        generation: In "stop" and "clean" the generation that is over, from "regroup" on the new one. On a
            replacement the one that it was born into, until it has joined the others.
        newborn: Whether this process is a replacement that has joined in this recovery.
        faults: What has ended the generations that this recovery leaves behind, oldest first, as far as it is known.
        step: Updates that are applied once training goes on; None before "repair".
        kind: Whether training goes on at the start of a batch window or in the tail of a step; None before "repair".
        replaced: Ranks that are new processes; empty before "regroup".
        forward: Ranks that make a committed update which they have missed; empty before "repair".
        moves: Shards that are sent, from whom to whom; empty before "repair".
    """

    phase: PhaseName
    rank: int
    world_size: int
    generation: int
    newborn: bool
    faults: tuple[Fault, ...]
    step: int | None = None
    kind: Kind | None = None
    replaced: tuple[int, ...] = ()
    forward: tuple[int, ...] = ()
    moves: tuple[Move, ...] = ()

    @property
    def survivors(self) -> tuple[int, ...]:
        """Ranks whose process has been there before, as far as it is known: they have state that others can take."""
        return tuple(rank for rank in range(self.world_size) if rank not in self.replaced)
