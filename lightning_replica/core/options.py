"""The user's options of recovery: one set of names, defaults and checks, for the strategy and for callbacks."""

from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, get_args

from lightning_replica.core import checks
from lightning_replica.core.digests import GuardMode

OnInexact: TypeAlias = Literal["report", "raise"]


@dataclass(frozen=True)
class RecoveryOptions:
    """Options that control the levels of recovery (retry, repair, replacement).

    Attributes:
        recovery: Whether the run recovers from faults at all.
        max_tries: Number of recoveries at one step before the run ends.
        on_inexact: What follows if something turns out not to be restored exactly by a recovery: "report" says what,
            "raise" also ends the run.
        guard: How much of a shard is checked for wrong bits in every step.
        max_restarts: Number of processes that may be replaced in one run.
        standby: Number of started processes that wait to become replacements.
        hang_min_s: Shortest time without progress that counts as a hang, in seconds.
        hang_max_s: Longest such time, in seconds.
        rendezvous_timeout_s: How long ranks wait for each other and for a replacement, and how long one recovery is
            tried, in seconds.
        gasp: Whether the survivors write a checkpoint when the run cannot continue.
        grace_s: How long the survivors have for it after a signal that ends the run, in seconds.

    Raises:
        ConfigurationError: If a value makes no sense.
    """

    recovery: bool = True
    max_tries: int = 3
    on_inexact: OnInexact = "report"
    guard: GuardMode = "sampled"
    max_restarts: int = 3
    standby: int = 0
    hang_min_s: float = 60.0
    hang_max_s: float = 1800.0
    rendezvous_timeout_s: float = 600.0
    gasp: bool = False
    grace_s: float = 10.0

    def __post_init__(self) -> None:
        checks.choice("recovery", self.recovery, (True, False))
        checks.whole(1, max_tries=self.max_tries)
        checks.choice("on_inexact", self.on_inexact, get_args(OnInexact))
        checks.choice("guard", self.guard, ("sampled", "full", "off"))
        checks.whole(0, max_restarts=self.max_restarts, standby=self.standby)
        checks.seconds(
            hang_min_s=self.hang_min_s,
            hang_max_s=self.hang_max_s,
            rendezvous_timeout_s=self.rendezvous_timeout_s,
            grace_s=self.grace_s,
        )
        checks.order(hang_min_s=self.hang_min_s, hang_max_s=self.hang_max_s)

    @property
    def given(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        default = RecoveryOptions()
        return {
            f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != getattr(default, f.name)
        }
