"""What ranks call the process groups that user code has made.

[Note: the same group]
Ranks name a group by its members, its backend, how far the script had come when it was made, and a number that counts
the groups that agree in all that: a script that makes the same groups in the same order on every start gives them the
same names in a replacement. Groups that are made in a training loop, a replacement does not have. It connects to them
all the same, and gets the handle when its own script asks for such a group. Groups that recovery hooks make are counted
for themselves, and end with the next recovery that replaces a rank: the hook is there to make them again.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Name:
    """What ranks call a group.

    Attributes:
        ranks: Its members, in their order in the group.
        backend: As it was asked for.
        origin: When it was made: "before 1", "in 1" (`Journal.place`), or "hooks 5", in those of generation 5.
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
        """The inverse of `key`."""
        ranks, backend, origin, number = key.split("/")
        return cls(_ranks(ranks), backend, origin, int(number))

    @property
    def counted_with(self) -> tuple[tuple[int, ...], str, str]:
        """What `number` counts."""
        return self.ranks, self.backend, self.origin


@dataclass(frozen=True)
class Held:
    """What a rank says of its handles when the world has stopped.

    Attributes:
        alive: Keys of groups that it has.
        gone: Keys of groups that its user code has destroyed.
    """

    alive: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()


def _runs(ranks: Sequence[int]) -> str:
    """Ranks as text: "0-3,6" for 0, 1, 2, 3, 6."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


def _ranks(text: str) -> tuple[int, ...]:
    """The inverse of `_runs`."""
    found: list[int] = []
    for run in text.split(","):
        first, _, last = run.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)
