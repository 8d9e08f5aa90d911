"""The reader of the log of incidents: JSON Lines, one recovery (or the failure of one) per line."""

from pathlib import Path

from lightning_replica.errors import ConfigurationError
from lightning_replica.recovery.incident import Incident


def read(log: Path) -> tuple[list[Incident], list[str]]:
    """Return the incidents of a log in order of time, and what is wrong with each line that is none.

    Raises:
        ConfigurationError: If the file cannot be read, or holds no incident.
    """
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise ConfigurationError(f"{log} cannot be read: {error.strerror}.") from error
    incidents, bad = [], []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                incidents.append(Incident.of_json(line))
            except ValueError as error:
                bad.append(f"{log}, line {number}: {error}")
    if not incidents:
        texts = "\n".join(
            [f"{log} holds no incident: nothing has happened, or it is not a log of incidents.", *bad[:3]]
        )
        raise ConfigurationError(texts)
    return sorted(incidents, key=lambda incident: incident.began), bad
