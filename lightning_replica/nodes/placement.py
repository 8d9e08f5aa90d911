"""Which node has which ranks. Pure: no store, no clock."""

import json
from collections.abc import Collection
from dataclasses import dataclass

from lightning_replica.errors import ProtocolError


@dataclass(frozen=True)
class Placement:
    """The nodes that train, by slot. Slot s has the ranks s * L to (s + 1) * L - 1, whichever node runs them.

    Attributes:
        slots: For each slot, the number of its node.
        generation: The generation that the ranks of `moved` are born into.
        moved: Slots that have another node than in the placement before.
    """

    slots: tuple[int, ...]
    generation: int = 0
    moved: tuple[int, ...] = ()

    def of(self, node: int) -> tuple[int, ...]:
        """Return the slots of ``node``; none if it is a spare."""
        return tuple(slot for slot, holder in enumerate(self.slots) if holder == node)

    def replacing(self, lost: Collection[int], spares: Collection[int], generation: int) -> "Placement | None":
        """Return the placement in which spares have the slots of lost nodes; None if there are too few spares.

        The spare that came first is used first.
        """
        free = sorted(set(spares) - set(lost) - set(self.slots))
        moved = tuple(slot for slot, holder in enumerate(self.slots) if holder in lost)
        if len(moved) > len(free):
            return None
        takes = dict(zip(moved, free, strict=False))
        slots = tuple(takes.get(slot, holder) for slot, holder in enumerate(self.slots))
        return Placement(slots, generation, moved)

    def to_json(self) -> str:
        """Return the placement as a line of JSON."""
        return json.dumps([self.slots, self.generation, self.moved])

    @classmethod
    def from_json(cls, line: bytes | str) -> "Placement":
        """Make a placement from what `to_json` returned.

        Raises:
            ProtocolError: If it is something else.
        """
        try:
            slots, generation, moved = json.loads(line)
            return cls(tuple(map(int, slots)), int(generation), tuple(map(int, moved)))
        except (ValueError, TypeError) as error:
            raise ProtocolError(f"{line!r} is no placement of nodes: {error}") from error


def ranks_of(slots: Collection[int], local_world_size: int) -> tuple[int, ...]:
    """Return the ranks of some slots."""
    return tuple(rank for s in sorted(slots) for rank in range(s * local_world_size, (s + 1) * local_world_size))
