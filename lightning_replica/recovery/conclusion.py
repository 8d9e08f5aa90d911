"""What all ranks do in a recovery, and what they must know of each other for it. One rank concludes it for all."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lightning_replica.core.grid import Table
from lightning_replica.groups.names import Held
from lightning_replica.recovery.hyperparameters import check_hyperparameters
from lightning_replica.recovery.planner import Plan, Report, make_plan


@dataclass(frozen=True)
class Conclusion:
    """The conclusion from the reports of all ranks.

    Attributes:
        plan: The plan.
        replaced: The ranks that are new processes.
        tries: Recoveries at this step so far.
        held: The handles of the ranks that have any.
    """

    plan: Plan
    replaced: tuple[int, ...]
    tries: int
    held: Mapping[int, Held] = field(default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        """Return the conclusion as plain data for JSON."""
        return {
            "plan": self.plan.to_plain(),
            "replaced": self.replaced,
            "tries": self.tries,
            "held": [[rank, asdict(held)] for rank, held in self.held.items()],
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "Conclusion":
        """Return the conclusion that `to_plain` has turned into ``plain``."""
        held = {rank: Held(**{name: tuple(names) for name, names in each.items()}) for rank, each in plain["held"]}
        return cls(Plan.from_plain(plain["plan"]), tuple(plain["replaced"]), plain["tries"], held)


def conclude(reports: Sequence[Report], table: Table, max_tries: int, advice: str) -> Conclusion:
    """Draw the conclusion from the reports of all ranks, in order of rank. A pure function.

    Args:
        reports: The reports.
        table: Which rank owns which shard.
        max_tries: See `make_plan`.
        advice: See `check_hyperparameters`.

    Raises:
        RecoveryError: See `check_hyperparameters` and `make_plan`.
        ProtocolError: See `make_plan`.
    """
    check_hyperparameters(reports, advice)
    plan = make_plan(reports, table, max_tries)
    replaced = tuple(report.rank for report in reports if report.is_replacement)
    held = {report.rank: report.groups for report in reports if report.groups != Held()}
    return Conclusion(plan, replaced, max(report.tries for report in reports), held)


def read_reports(parts: Sequence[dict[str, Any]], found: Callable[[int], bool], newest: int) -> list[Report]:
    """Return the reports that ranks have given, with what is known about wrong bits since each rank last trained.

    Args:
        parts: The reports as plain data.
        found: Returns whether wrong bits were found before a generation.
        newest: The generation of the reports.
    """
    reports = [Report.from_plain(part) for part in parts]
    first = min(report.left for report in reports) + 1
    last = max((number for number in range(first, newest + 1) if found(number)), default=-1)
    return [replace(report, corruption_seen=last > report.left) for report in reports]
