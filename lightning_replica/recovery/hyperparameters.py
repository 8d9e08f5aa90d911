"""The settings that ranks train with. If they differ, ranks make different updates of the same shard."""

from collections.abc import Sequence

from lightning_replica.errors import RecoveryError
from lightning_replica.recovery.planner import Report


def check_hyperparameters(reports: Sequence[Report], advice: str) -> None:
    """Make sure that a wrong shard is not the result of ranks that updated it with different settings.

    Settings are compared only if a shard is wrong, and only between ranks that report those of the same step.

    Args:
        reports: One report of every rank.
        advice: What the user can do if settings differ.

    Raises:
        RecoveryError: If the settings differ.
    """
    wrong = [report for report in reports if report.corrupted and report.settings]
    if not wrong:
        return
    step = wrong[0].settings_step
    reported = {report.rank: dict(report.settings) for report in reports if report.settings_step == step}
    names = {name: None for settings in reported.values() for name in settings}
    found = []
    for name in names:
        ranks: dict[str, list[int]] = {}
        for rank, settings in reported.items():
            ranks.setdefault(settings.get(name, "none"), []).append(rank)
        if len(ranks) > 1:
            found.append(f"{name} is {' and '.join(f'{value} on {_named(of)}' for value, of in ranks.items())}")
    if found:
        raise RecoveryError(
            f"The ranks made the update to step {step} with different settings, so the holders of a shard no longer"
            f" make the same update: {'; '.join(found)}. {advice}"
        )


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
