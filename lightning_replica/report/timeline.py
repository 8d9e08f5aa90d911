"""The reader of the log of incidents: JSON Lines, one recovery (or the failure of one) per line."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, get_args

from lightning_replica.control.faults import Detected
from lightning_replica.core.points import PHASES
from lightning_replica.errors import ConfigurationError
from lightning_replica.recovery.incident import SCHEMA


@dataclass(frozen=True)
class Move:
    """A shard that was sent.

    Attributes:
        source: The rank that sent it.
        target: The rank that took it.
        bytes: Its size in bytes.
    """

    source: int
    target: int
    bytes: int


@dataclass(frozen=True)
class Incident:
    """One line of the log.

    Attributes:
        number: Number of the incident in its run, from 1.
        time: When the fault was seen.
        failed: Why recovery failed; empty if it did not.
        detected: How the fault was noticed.
        ranks: The ranks at fault, if they are known.
        why: The fault in words.
        faults: All faults until training resumed, in words, oldest first.
        level: "retry", "repair" or "replacement".
        step: The step at which training resumes.
        epoch: The epoch in which training resumes.
        kind: "batch" or "tail": what is done again.
        replaced: Ranks that are new processes.
        moves: Shards that were sent.
        phases_ms: Milliseconds of each phase.
        recovery_s: Seconds from the fault to the moment when training resumes.
        first_good_step_s: Seconds from the fault to the end of the first step after it; None if there was none.
        redone: The work that was discarded, in words.
    """

    number: int
    time: datetime
    failed: str
    detected: Detected
    ranks: tuple[int, ...]
    why: str
    faults: tuple[str, ...]
    level: str
    step: int
    epoch: int
    kind: str
    replaced: tuple[int, ...]
    moves: tuple[Move, ...]
    phases_ms: dict[str, float]
    recovery_s: float
    first_good_step_s: float | None
    redone: str

    @property
    def length_s(self) -> float:
        """Seconds from the fault to the first good step after it; if there was none, to the end of the recovery."""
        return max(self.recovery_s, sum(self.phases_ms.values()) / 1000, self.first_good_step_s or 0.0)

    @property
    def end(self) -> datetime:
        """The time when the first good step was completed, or the recovery had failed."""
        return self.time + timedelta(seconds=self.length_s)

    @classmethod
    def of(cls, line: str) -> "Incident":
        """Return the incident that a line of the log describes.

        Raises:
            ValueError: If the line is no incident; the message says what is wrong.
        """
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"no JSON ({error.msg} at character {error.pos + 1})") from None
        if not isinstance(record, dict) or "schema" not in record:
            raise ValueError("no incident: there is no 'schema'")
        if record["schema"] != SCHEMA:
            raise ValueError(f"schema {record['schema']!r} is not known, only {SCHEMA}: another version wrote it")
        try:
            return cls._of(record)
        except KeyError as error:
            raise ValueError(f"{error} is missing") from None
        except (TypeError, AttributeError) as error:
            raise ValueError(f"a value is of another type than it should be ({error})") from None

    @classmethod
    def _of(cls, record: Mapping[str, Any]) -> "Incident":
        time = datetime.fromisoformat(record["time"])
        if record["detected"] not in get_args(Detected):
            raise ValueError(f"detected={record['detected']!r} is not known")
        if record["outcome"] not in ("recovered", "failed"):
            raise ValueError(f"outcome={record['outcome']!r} is neither 'recovered' nor 'failed'")
        first, redone = record["first_good_step_s"], record["redone"]
        return cls(
            number=int(record["incident"]),
            time=time if time.tzinfo else time.replace(tzinfo=timezone.utc),
            failed=(record["error"] or "it failed") if record["outcome"] == "failed" else "",
            detected=record["detected"],
            ranks=tuple(map(int, record["ranks"])),
            why=str(record["why"]),
            faults=tuple(str(fault["text"]) for fault in record["faults"]),
            level=str(record["level"]),
            step=int(record["step"]),
            epoch=int(record["epoch"]),
            kind=str(record["kind"]),
            replaced=tuple(map(int, record["replaced"])),
            moves=tuple(Move(int(m["source"]), int(m["target"]), int(m["bytes"])) for m in record["moves"]),
            phases_ms={phase: float(record["phases_ms"].get(phase) or 0.0) for phase in PHASES},
            recovery_s=float(record["recovery_s"] or 0.0),
            first_good_step_s=None if first is None else float(first),
            redone=f"{redone['batches']} batches, {float(redone['seconds']):.2f} s" if redone else "",
        )


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
                incidents.append(Incident.of(line))
            except ValueError as error:
                bad.append(f"{log}, line {number}: {error}")
    if not incidents:
        texts = "\n".join([f"{log} holds no incident: nothing has happened, or it is another file.", *bad[:3]])
        raise ConfigurationError(texts)
    return sorted(incidents, key=lambda incident: incident.time), bad
