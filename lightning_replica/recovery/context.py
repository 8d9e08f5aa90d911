"""The description of the recovery under way that each hook is passed."""

from dataclasses import dataclass

from lightning_replica.control.faults import Fault
from lightning_replica.core.points import PhaseName
from lightning_replica.core.recoverable import Kind
from lightning_replica.recovery.planner import Move


@dataclass(frozen=True)
class RecoveryContext:
    """What is known in one phase of a recovery.

    From "regroup" on it is the same on every rank, except for ``rank``, ``is_replacement`` and, where ranks have joined
    at different times, ``faults``.

    Attributes:
        phase: The phase.
        rank: This rank.
        world_size: Number of ranks.
        generation: In "stop" and "clean" the generation that is over, from "regroup" on the new one. On a
            replacement the one in which it was started, until it joins the others.
        is_replacement: Whether this process is a replacement that joins in this recovery.
        faults: The faults that ended the generations which this recovery leaves behind, oldest first, as far as they
            are known.
        step: Updates of this fit that are applied when training resumes; None before "repair". After a resume from a
            checkpoint, ``trainer.global_step`` counts those before it, too.
        kind: Whether training resumes at the start of a batch window or in the tail of a step; None before "repair".
        replaced: Ranks that are new processes; empty before "regroup".
        forward: Ranks that make a committed update which they have missed; empty before "repair".
        moves: Shards that are sent, with source and target; empty before "repair".
    """

    phase: PhaseName
    rank: int
    world_size: int
    generation: int
    is_replacement: bool
    faults: tuple[Fault, ...]
    step: int | None = None
    kind: Kind | None = None
    replaced: tuple[int, ...] = ()
    forward: tuple[int, ...] = ()
    moves: tuple[Move, ...] = ()

    @property
    def newborn(self) -> bool:
        """The former name of `is_replacement`."""
        return self.is_replacement

    @property
    def survivors(self) -> tuple[int, ...]:
        """Ranks whose process existed before this recovery, as far as is known; others can take their state."""
        return tuple(rank for rank in range(self.world_size) if rank not in self.replaced)
