"""An incident: everything that went wrong between two good steps, and how it ended."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta, timezone
from itertools import islice
from typing import Any, Literal, get_args

from lightning_replica.control.faults import Detected, Fault, most_telling
from lightning_replica.core.points import PHASES
from lightning_replica.core.recoverable import Kind

_NAMED = 5  # of what is not exact, in the line for the user
SCHEMA = 1  # version of the line that `to_json` returns


@dataclass(frozen=True)
class Transferred:
    """A shard that was sent.

    Attributes:
        source: The rank that sent it.
        target: The rank that took it.
        bytes: Its size on the wire, checksums included.
        seconds: Seconds that the transfer took at the target.
        host: Whether the host state came with it.
    """

    source: int
    target: int
    bytes: int
    seconds: float
    host: bool


@dataclass(frozen=True)
class Incident:
    """Everything that happened between one good step and the next, as one rank reports it.

    All faults and recoveries until the next completed step belong to one incident.

    Attributes:
        number: Number of the incident in the run; the first is 1.
        time: When the first fault was seen, ISO 8601, UTC.
        outcome: Whether training resumed.
        error: Why it did not; empty if it did.
        faults: The faults that ended each of the generations that are left behind, oldest first.
        generation: The generation in which training resumed.
        step: Updates that were applied when it resumed.
        epoch: Epoch in which it resumed.
        kind: Whether it resumed at the start of a batch window or in the tail of a step.
        replaced: Ranks that are new processes.
        forward: Ranks that made a committed update which they had missed.
        moves: Shards that were sent.
        phases_s: Seconds in each phase, summed over all recoveries of the incident.
        recovery_s: Seconds from the fault to the moment when training resumed, summed over all recoveries.
        first_good_step_s: Seconds from the first fault to the end of the first good step; None if there is none.
        redone_batches: Batches that were begun but led to no step.
        redone_s: Seconds that were spent on these batches.
        reporter: The rank that reports the incident; it reports its own times.
        inexact: What is not exact after the recovery, as far as any rank has found out: the reasons, by name.
    """

    number: int
    time: str
    outcome: Literal["recovered", "failed"]
    error: str
    faults: tuple[Fault, ...]
    generation: int
    step: int
    epoch: int
    kind: Kind
    replaced: tuple[int, ...]
    forward: tuple[int, ...]
    moves: tuple[Transferred, ...]
    phases_s: dict[str, float]
    recovery_s: float
    first_good_step_s: float | None
    redone_batches: int
    redone_s: float
    reporter: int
    inexact: dict[str, str] = field(default_factory=dict)

    @property
    def teller(self) -> int:
        """The former name of `reporter`."""
        return self.reporter

    @property
    def fault(self) -> Fault:
        """The fault that explains the most; see `most_telling`."""
        return most_telling(self.faults)

    @property
    def level(self) -> Literal["retry", "repair", "replacement"]:
        """The highest level of recovery that was needed."""
        return "replacement" if self.replaced else "repair" if self.moves else "retry"

    @property
    def failed(self) -> bool:
        """Whether training did not resume."""
        return self.outcome == "failed"

    @property
    def began(self) -> datetime:
        """The time when the first fault was seen."""
        time = datetime.fromisoformat(self.time)
        return time if time.tzinfo else time.replace(tzinfo=timezone.utc)

    @property
    def ended(self) -> datetime:
        """The time when the first good step was completed, or the recovery had failed."""
        length_s = max(self.recovery_s, sum(self.phases_s.values()), self.first_good_step_s or 0.0)
        return self.began + timedelta(seconds=length_s)

    def to_json(self) -> str:
        """Return the incident as one line of JSON, in which times are rounded to a microsecond."""
        plain: dict[str, Any] = {
            "schema": SCHEMA,
            "incident": self.number,
            "time": self.time,
            "outcome": self.outcome,
            "error": self.error,
            "detected": self.fault.detected,
            "ranks": self.fault.ranks,
            "why": self.fault.text,
            "faults": [asdict(fault) for fault in self.faults],
            "level": self.level,
            "generation": self.generation,
            "step": self.step,
            "epoch": self.epoch,
            "kind": self.kind,
            "replaced": self.replaced,
            "forward": self.forward,
            "moves": [{**asdict(move), "seconds": round(move.seconds, 6)} for move in self.moves],
            "phases_ms": {phase: round(1000 * seconds, 3) for phase, seconds in self.phases_s.items()},
            "recovery_s": round(self.recovery_s, 6),
            "first_good_step_s": None if self.first_good_step_s is None else round(self.first_good_step_s, 6),
            "inexact": self.inexact,
            "redone": {"batches": self.redone_batches, "seconds": round(self.redone_s, 6)},
        }
        return json.dumps(plain)

    @classmethod
    def of_json(cls, line: str) -> "Incident":
        """Return the incident that a line of `to_json` describes.

        Raises:
            ValueError: If the line is no incident; the message says what is wrong.
        """
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON ({error.msg} at character {error.pos + 1})") from None
        if not isinstance(record, dict) or "schema" not in record:
            raise ValueError("not an incident: 'schema' is missing")
        if record["schema"] != SCHEMA:
            raise ValueError(f"schema {record['schema']!r} is not known, only {SCHEMA}: another version wrote it")
        try:
            return cls._of(record)
        except KeyError as error:
            raise ValueError(f"{error} is missing") from None
        except (TypeError, AttributeError) as error:
            raise ValueError(f"a value has the wrong type ({error})") from None

    @classmethod
    def _of(cls, record: Mapping[str, Any]) -> "Incident":
        datetime.fromisoformat(record["time"])
        if not record["faults"]:
            raise ValueError("it has no fault")
        first, redone = record["first_good_step_s"], record["redone"]
        return cls(
            number=int(record["incident"]),
            time=record["time"],
            outcome=_one_of("outcome", record["outcome"], ("recovered", "failed")),
            error=str(record["error"]),
            faults=tuple(map(_fault, record["faults"])),
            generation=int(record["generation"]),
            step=int(record["step"]),
            epoch=int(record["epoch"]),
            kind=_one_of("kind", record["kind"], get_args(Kind)),
            replaced=tuple(map(int, record["replaced"])),
            forward=tuple(map(int, record["forward"])),
            moves=tuple(map(_transferred, record["moves"])),
            phases_s={phase: float(record["phases_ms"].get(phase) or 0.0) / 1000 for phase in PHASES},
            recovery_s=float(record["recovery_s"]),
            first_good_step_s=None if first is None else float(first),
            redone_batches=int(redone["batches"]),
            redone_s=float(redone["seconds"]),
            reporter=-1,  # the line does not say
            inexact={str(name): str(why) for name, why in record.get("inexact", {}).items()},
        )


def _fault(record: Mapping[str, Any]) -> Fault:
    detected = _one_of("detected", record["detected"], get_args(Detected))
    return Fault(detected, tuple(map(int, record["ranks"])), str(record["text"]))


def _transferred(record: Mapping[str, Any]) -> Transferred:
    source, target, size = (int(record[name]) for name in ("source", "target", "bytes"))
    return Transferred(source, target, size, float(record["seconds"]), bool(record["host"]))


def _one_of(name: str, value: Any, known: tuple[str, ...]) -> Any:
    if value not in known:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(known)}")
    return value


def describe(incident: Incident) -> str:
    """Return one line for the user: what happened, what was decided, where each shard came from, how long it took."""
    if incident.failed:
        where = f" at step {incident.step}" if incident.step >= 0 else ""  # unknown on a replacement: -1
        return f"recovery failed{where}: {incident.error}"
    who = ", ".join(map(str, incident.replaced))
    ranks = f"rank{'s' * (len(incident.replaced) > 1)} {who}"
    what = f"{ranks} {'were' if len(incident.replaced) > 1 else 'was'} replaced" if who else "no process was lost"
    again = "batch is done again" if incident.kind == "batch" else "tail of the step is done again"
    redone = f" ({incident.redone_batches} begun, {incident.redone_s:.2f} s)" if incident.redone_batches else ""
    moves = [
        f"rank {move.target} has its shard from rank {move.source} ({_size(move.bytes)} in {move.seconds:.3f} s)"
        for move in incident.moves
    ]
    phases = ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in incident.phases_s.items())
    more = f" and {len(incident.faults) - 1} more" if len(incident.faults) > 1 else ""
    parts = [
        f"recovered at step {incident.step} in {incident.recovery_s:.2f} s: {what}",
        f"the {again}{redone}",
        *moves,
        f"{incident.fault.detected}{more}: {incident.fault.text}",
        f"{phases} s",
        *(f"NOT EXACT in {name}: {why}" for name, why in islice(incident.inexact.items(), _NAMED)),
    ]
    if len(incident.inexact) > _NAMED:
        parts.append(f"and {len(incident.inexact) - _NAMED} more that are not exact")
    return "; ".join(parts)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
