"""Which node has which ranks. Pure: no store, no clock."""

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from lightning_replica.control.untrusted import from_json
from lightning_replica.errors import ProtocolError

VACANT: Final = -1
"""The holder of a slot whose node is lost and for which no other node has come yet."""


@dataclass(frozen=True)
class Placement:
    """The nodes that train, by slot. Slot s has the ranks s * L to (s + 1) * L - 1, whichever node runs them.

    A node has one slot, or several if it has doubled up.

    Attributes:
        slots: For each slot, the number of its node, or `VACANT`.
        moved: Slots whose ranks their node starts now. The generation with which this placement begins is theirs.
    """

    slots: tuple[int, ...]
    moved: tuple[int, ...] = ()

    def of(self, node: int) -> tuple[int, ...]:
        """Return the slots of ``node``; none if it is a spare."""
        return tuple(slot for slot, holder in enumerate(self.slots) if holder == node)

    @property
    def nodes(self) -> frozenset[int]:
        """The nodes that have slots."""
        return frozenset(self.slots) - {VACANT}

    @property
    def vacant(self) -> tuple[int, ...]:
        """The slots that no node has."""
        return self.of(VACANT)

    def replacing(self, lost: Collection[int], alive: Collection[int]) -> "Placement":
        """Return the placement in which spares have the slots of lost nodes and those that were vacant.

        The spare that came first gets the first slot. Slots for which there is no spare are vacant.

        Args:
            lost: Nodes that are lost.
            alive: Nodes that are not. Those without a slot are spares.
        """
        free = iter(sorted(set(alive) - set(lost) - self.nodes))
        open_ = [slot for slot, holder in enumerate(self.slots) if holder == VACANT or holder in lost]
        takes = {slot: next(free, VACANT) for slot in open_}
        slots = tuple(takes.get(slot, holder) for slot, holder in enumerate(self.slots))
        return Placement(slots, tuple(slot for slot in open_ if takes[slot] != VACANT))

    def doubled(self) -> "Placement":
        """Return the placement in which the nodes that have slots take the vacant ones too, those with fewest first."""
        slots, nodes = list(self.slots), sorted(self.nodes)
        for slot in self.vacant:
            slots[slot] = min(nodes, key=lambda node: (slots.count(node), node))
        return Placement(tuple(slots), tuple(sorted({*self.moved, *self.vacant})))

    def crowd(self, node: int) -> tuple[int, ...]:
        """Return the slots of ``node`` that it should not have: all but the first."""
        return self.of(node)[1:]

    def spread(self, slots: Collection[int], alive: Collection[int]) -> "Placement":
        """Return the placement in which spares have some slots. Slots for which there is none start where they are.

        Args:
            slots: The slots.
            alive: Nodes that are not lost. Those without a slot are spares.
        """
        free = iter(sorted(set(alive) - self.nodes))
        takes = {slot: next(free, self.slots[slot]) for slot in sorted(slots)}
        moved = tuple(takes.get(slot, holder) for slot, holder in enumerate(self.slots))
        return Placement(moved, tuple(sorted({*self.moved, *takes})))

    def to_json(self) -> str:
        """Return the placement as a line of JSON."""
        return json.dumps([self.slots, self.moved])

    @classmethod
    def from_json(cls, line: bytes | str) -> "Placement":
        """Make a placement from what `to_json` returned.

        Raises:
            ProtocolError: If it is something else.
        """
        try:
            slots, moved = (tuple(map(int, each)) for each in from_json(line))
        except (ValueError, TypeError, OverflowError) as error:
            raise ProtocolError(f"{line[:80]!r} is no placement of nodes: {error}") from error
        if not set(moved) <= set(range(len(slots))):
            raise ProtocolError(f"{line!r} is no placement of nodes: there are no slots {moved}.")
        return cls(slots, moved)


def ranks_of(slots: Collection[int], local_world_size: int) -> tuple[int, ...]:
    """Return the ranks of some slots."""
    return tuple(rank for s in sorted(slots) for rank in range(s * local_world_size, (s + 1) * local_world_size))
