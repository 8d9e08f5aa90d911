"""Faults to inject: a single fault, a list of them as text, and random ones. Pure code."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from lightning_replica.chaos.fault_points import FAULT_POINTS, FaultPoint
from lightning_replica.core import checks
from lightning_replica.core.points import PHASES
from lightning_replica.errors import ConfigurationError

FaultKind: TypeAlias = Literal["kill", "exception", "hang", "exit", "memory", "corrupt", "sigterm"]
KINDS: tuple[FaultKind, ...] = get_args(FaultKind)

# Points where the shard is at rest: a bit that flips there is found. A flip during the update is a wrong update.
_AT_REST = ("batch_start", "forward", "backward", "train_batch_end", "validation", "epoch_end", "scheduler", "logger")


@dataclass(frozen=True)
class InjectedFault:
    """A fault that strikes once, when its rank first comes to its point after it is due.

    Attributes:
        kind: "kill" (SIGKILL), "exception", "hang" (SIGSTOP), "exit" (``os._exit``), "memory" (MemoryError), "corrupt"
            (a bit of the shard is flipped) or "sigterm".
        rank: The rank that it strikes.
        point: Where it strikes: a name of `lightning_replica.core.points`, or of `chaos.fault_points.UserPoint`.
        step: Number of updates that must have been applied.
        after_s: Seconds that must have passed since the first batch.

    Raises:
        ConfigurationError: If a value makes no sense.
    """

    kind: FaultKind
    rank: int
    point: FaultPoint
    step: int = 0
    after_s: float = 0.0

    def __post_init__(self) -> None:
        checks.choice("kind", self.kind, KINDS)
        checks.choice("point", self.point, FAULT_POINTS)
        checks.whole(0, rank=self.rank, step=self.step)
        if isinstance(self.after_s, bool) or not isinstance(self.after_s, (int, float)) or not 0 <= self.after_s < 1e12:
            raise ConfigurationError(f"after_s={self.after_s!r} must be a number of seconds, 0 or more.")

    def __str__(self) -> str:
        seconds = f":{self.after_s:g}" if self.after_s else ""
        return f"{self.kind}:{self.rank}:{self.point}:{self.step}{seconds}"

    @classmethod
    def parse(cls, text: str) -> "InjectedFault":
        """Parse what ``str`` returns: "kind:rank:point:step", with ":seconds" at the end if it is due by the clock.

        Raises:
            ConfigurationError: If ``text`` is not a fault.
        """
        try:
            kind, rank, point, step, *rest = text.strip().split(":")
            (after_s,) = rest or ["0"]
            parts = int(rank), int(step), float(after_s)
        except ValueError:
            raise ConfigurationError(
                f"{text!r} is not a fault. Write kind:rank:point:step, for example kill:2:forward:30."
            ) from None
        return cls(kind, parts[0], point, parts[1], parts[2])  # type: ignore[arg-type]  # checked by the class


def parse_all(faults: str | Iterable[str | InjectedFault]) -> tuple[InjectedFault, ...]:
    """Return the faults that a user has given, as a list or as one string with commas."""
    if isinstance(faults, str):
        faults = [part for part in faults.split(",") if part.strip()]
    return tuple(fault if isinstance(fault, InjectedFault) else InjectedFault.parse(str(fault)) for fault in faults)


@dataclass(frozen=True)
class Dice:
    """The source of random faults.

    Attributes:
        seed: The same seed draws the same faults.
        kinds: Kinds, all equally likely. SIGTERM ends a run, so only the last fault can be one.
        points: Points, all equally likely. A bit flips only where the shard is at rest.

    Raises:
        ConfigurationError: If a value makes no sense.
    """

    seed: int
    kinds: Sequence[FaultKind]
    points: Sequence[FaultPoint]

    def __post_init__(self) -> None:
        checks.whole(0, seed=self.seed)
        for name, given, known in (("kinds", self.kinds, KINDS), ("points", self.points, FAULT_POINTS)):
            if not given:
                raise ConfigurationError(f"{name} is empty: give at least one of {', '.join(known)}.")
            for each in given:
                checks.choice(name, each, known)
        if tuple(self.kinds) == ("corrupt",) and not set(self.points) & set(_AT_REST):
            raise ConfigurationError(f"A flipped bit is found only at {', '.join(_AT_REST)}: add one to points.")

    def arrivals(self, mean: float, count: int) -> list[float]:
        """Return the times of ``count`` independent faults, which come every ``mean`` on average."""
        dice = random.Random(f"{self.seed}/arrivals")
        times = [0.0]
        for _ in range(count):
            times.append(times[-1] + dice.expovariate(1 / mean))
        return times[1:]

    def spread(self, count: int, steps: int) -> list[int]:
        """Return the steps of independent faults, of which exactly ``count`` come in ``steps`` steps."""
        dice = random.Random(f"{self.seed}/spread")
        return sorted(dice.randrange(max(1, steps)) for _ in range(count))

    def draw(
        self, due: Sequence[tuple[int, float]], world_size: int, last: Mapping[str, int] | None = None
    ) -> list[InjectedFault]:
        """Draw one fault for each (step, seconds) of ``due``.

        Args:
            due: When each fault may strike at the earliest.
            world_size: Number of ranks.
            last: The last step at which each point is reached, if known. A fault that would come too late for its
                point gets another point, or is left out.
        """
        dice = random.Random(f"{self.seed}/faults")
        drawn: list[InjectedFault] = []
        followed = False  # whether a later fault is drawn in whose recovery this one can strike
        for number, (step, after_s) in reversed(list(enumerate(due))):
            kinds = [kind for kind in self.kinds if kind != "sigterm" or number == len(due) - 1]
            kind, rank = (dice.choice(kinds) if kinds else None), dice.randrange(world_size)
            points = [
                p for p in self.points if _may_strike(kind, p) and (followed if p in PHASES else _comes(p, step, last))
            ]
            if kind is not None and points:
                drawn.insert(0, InjectedFault(kind, rank, dice.choice(points), step, after_s))
                followed = followed or (drawn[0].point not in PHASES and kind != "sigterm")
        return drawn


def _comes(point: FaultPoint, step: int, last: Mapping[str, int] | None) -> bool:
    return last is None or step <= last.get(point, -1)


def _may_strike(kind: FaultKind | None, point: FaultPoint) -> bool:
    if kind == "corrupt":
        return point in _AT_REST
    return kind != "sigterm" or point not in PHASES
