"""The names that ranks use for the process groups that user code has made.

[Note: the same group]
The name of a group consists of its members, its backend, how far the script had come when the group was made, and a
number that counts the groups for which all of this is the same. A script that makes the same groups in the same order
on every start therefore gives them the same names in a replacement. A replacement does not have the groups that were
made in a training loop. It connects to them nevertheless, and its script gets the handle when it asks for such a group.
Groups that recovery hooks make are counted separately. They end with the next recovery that replaces a rank; the hooks
make them again then.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Name:
    """The name of a group, the same on all ranks.

    Attributes:
        ranks: The members, in their order in the group.
        backend: The backend, as the caller named it.
        origin: When it was made: "before 1", "in 1" (`Journal.place`), or "hooks 5", in the hooks of generation 5.
        number: Counts groups with the same ``ranks``, ``backend`` and ``origin``.
    """

    ranks: tuple[int, ...]
    backend: str
    origin: str
    number: int

    @property
    def key(self) -> str:
        """The name as text."""
        return f"{_runs(self.ranks)}/{self.backend}/{self.origin}/{self.number}"

    @classmethod
    def of(cls, key: str) -> "Name":
        """Return the name that has this `key`."""
        ranks, backend, origin, number = key.split("/")
        return cls(_ranks(ranks), backend, origin, int(number))

    @property
    def counted_with(self) -> tuple[tuple[int, ...], str, str]:
        """The ranks, backend and origin; `number` counts the groups that share them."""
        return self.ranks, self.backend, self.origin


@dataclass(frozen=True)
class Held:
    """The handles that a rank reports when the world has stopped.

    Attributes:
        alive: Keys of groups that the rank has.
        gone: Keys of groups that its user code has destroyed.
    """

    alive: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()


def _runs(ranks: Sequence[int]) -> str:
    """Return ranks as text: "0-3,6" for 0, 1, 2, 3, 6."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


def _ranks(text: str) -> tuple[int, ...]:
    """Return the ranks of a text that `_runs` returned."""
    found: list[int] = []
    for run in text.split(","):
        first, _, last = run.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)
