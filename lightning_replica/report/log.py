"""The log of incidents: JSON Lines, one incident per line."""

import json
from pathlib import Path

from lightning_replica.core.lines import append
from lightning_replica.core.messages import say
from lightning_replica.recovery.incident import Incident


class IncidentLog:
    """Writes incidents to the log. Every rank has an instance; the rank that reports an incident writes its line.

    If that rank is lost before it has written the line, the line is written together with the next one.

    Args:
        path: The file; it may exist already.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last: tuple[tuple[str, int], str] | None = None

    def add(self, incident: Incident, rank: int) -> None:
        """Add an incident: if this rank reports it, append its line to the file in one write; remember it.

        Args:
            incident: The incident.
            rank: This rank.
        """
        known, line = (incident.time, incident.generation), incident.to_json()
        if incident.reporter == rank:
            self._write([*filter(None, [self._last]), (known, line)])
        self._last = known, line

    def _write(self, lines: list[tuple[tuple[str, int], str]]) -> None:
        """Append those of ``lines`` that are not in the file yet."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            content = self._path.read_bytes() if self._path.exists() else b""
            written = {_known(line) for line in content.splitlines()}
            text = "".join(f"{line}\n" for known, line in lines if known not in written)
            if content and not content.endswith(b"\n"):
                text = f"\n{text}"  # a process died in the middle of a line
            append(self._path, text)
        except OSError as error:  # no reason to end a training that has just recovered
            say(f"the incident could not be written to {self._path}: {error}")


def _known(line: bytes) -> tuple[str, int] | None:
    try:
        plain = json.loads(line)
        return plain["time"], plain["generation"]
    except (ValueError, KeyError, TypeError):
        return None
