"""The progress of the ranks of a run, read from their fingerprints while they train."""

import json
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class _Rank:
    """What one rank has written so far."""

    path: Path
    read: int = 0
    lives: int = 0
    pid: int = 0
    step: int = 0

    def look(self) -> None:
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self.read)
            lines = file.read().split(b"\n")
        self.read += sum(len(line) + 1 for line in lines[:-1])  # the last line may be incomplete
        for line in lines[:-1]:
            record = json.loads(line)
            if record["fit"] != 0:
                continue
            if "world" in record:
                self.lives, self.pid, self.step = self.lives + 1, record["pid"], 0
            self.step = record.get("step", self.step)


@dataclass
class Progress:
    """The progress of the ranks in the first fit.

    Attributes:
        folder: Where the ranks write their fingerprints.
        ranks: Number of ranks.
    """

    folder: Path
    ranks: int
    _ranks: list[_Rank] = field(init=False)
    _after: list[tuple[int, int]] | None = None  # by rank: lives and steps to reach before a fault is over

    def __post_init__(self) -> None:
        self._ranks = [_Rank(self.folder / f"rank{rank}.jsonl") for rank in range(self.ranks)]

    def look(self) -> None:
        """Read what ranks have written since the last call."""
        for rank in self._ranks:
            rank.look()

    @property
    def pids(self) -> dict[int, int]:
        """The rank of each process that has begun its fit, by process id."""
        return {each.pid: rank for rank, each in enumerate(self._ranks) if each.pid}

    @property
    def newest(self) -> int:
        """The last step that any rank has made."""
        return max(rank.step for rank in self._ranks)

    @property
    def oldest(self) -> int:
        """The last step that all ranks have made."""
        return min(rank.step for rank in self._ranks)

    def expect_more(self, steps: int, anew: bool) -> None:
        """Record that a fault has struck.

        Args:
            steps: Number of steps that the ranks must make before the fault is over.
            anew: Whether the job starts again; then each rank must begin its fit again and make one step.
        """
        newest = self.newest
        self._after = [(rank.lives + 1, 1) if anew else (0, newest + steps) for rank in self._ranks]

    @property
    def recovered(self) -> bool:
        """Whether the last fault is over."""
        if self._after is None:
            return True
        after = zip(self._ranks, self._after, strict=True)
        return all(rank.lives >= lives and rank.step >= step for rank, (lives, step) in after)
