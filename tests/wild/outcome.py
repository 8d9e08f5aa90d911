"""What a training has left behind, and in what two of them differ."""

import csv
import hashlib
import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

# In the names of files: when a run began, who wrote. Runs are compared with what differs for that reason taken out.
_ALIKE = (
    (re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d"), "TIME"),  # Hydra
    (re.compile(r"-\d{8}_\d{6}-"), "-TIME-"),  # wandb
    (re.compile(r"events\.out\.tfevents\..*"), "events"),
)
# Names that loggers draw for their runs: the first that is met is run 0, and so on.
_DRAWN = re.compile(r"(?<=mlruns/)\d{18}|(?<=/)[0-9a-f]{32}(?=/)|(?<=-TIME-)\w{8}|(?<=run-)\w{8}(?=\.wandb)")


@dataclass(frozen=True)
class Progress:
    """A line of a rank's progress file."""

    time_s: float
    pid: int
    fit: int
    place: str
    step: int


@dataclass(frozen=True)
class Outcome:
    """What a run came to.

    Attributes:
        code: Its exit code.
        ranks: For each rank and stage ("fit", "validate", "test", "predict"), what its last one ended with.
        rows: What loggers have written, by file.
        checkpoints: Their contents, by file; tensors as digests.
        files: All files in the working directory, by name.
        output: Standard output and error.
        progress: For each rank, what it has passed.
    """

    code: int
    ranks: list[dict[str, Any]]
    rows: dict[str, list[Any]]
    checkpoints: dict[str, Any]
    files: list[str]
    output: str = field(repr=False)
    progress: list[list[Progress]] = field(repr=False)

    @classmethod
    def read(cls, code: int, out: Path, work: Path, output: str, ranks: int = 2, checkpoints: bool = True) -> "Outcome":
        """Reads what the run of ``work`` has left, and what its watcher has written to ``out``.

        Args:
            code: Its exit code.
            out: What the watcher writes to.
            work: Its working directory.
            output: Standard output and error.
            ranks: Number of ranks.
            checkpoints: Whether to read checkpoints, which may hold objects of packages that are not installed here.
        """
        files = _names(sorted(path for path in work.rglob("*") if path.is_file()), work)
        return cls(
            code,
            [_evidence(out / f"evidence{rank}.jsonl") for rank in range(ranks)],
            dict(_rows(files)),
            {name: _checkpoint(path, work) for path, name in files.items() if checkpoints and path.suffix == ".ckpt"},
            sorted(set(files.values())),
            output,
            [progress(out / f"progress{rank}") for rank in range(ranks)],
        )

    def differences(self, other: "Outcome", ignore: str = "") -> list[str]:
        """Says in what this differs from ``other``; names that match the pattern ``ignore`` are left out."""
        found = []
        for what in ("ranks", "rows", "checkpoints", "files"):
            found += list(_differences(what, getattr(self, what), getattr(other, what)))
        return [line for line in found if not (ignore and re.search(ignore, line))]


def progress(path: Path) -> list[Progress]:
    """Reads a rank's progress file; a line that is being written does not count."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    fields = [line.split() for line in lines]
    return [Progress(float(t), int(pid), int(fit), place, int(step)) for t, pid, fit, place, step in fields]


def _evidence(path: Path) -> dict[str, Any]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {entry.pop("stage"): entry for entry in map(json.loads, lines)}


def _names(files: list[Path], work: Path) -> dict[Path, str]:
    """Names files in a way that does not depend on when they were written."""
    drawn: dict[str, str] = {}
    return {
        path: _DRAWN.sub(
            lambda match: drawn.setdefault(match.group(), f"RUN{len(drawn)}"), _alike(str(path.relative_to(work)))
        )
        for path in files
    }


def _alike(text: str) -> str:
    for pattern, alike in _ALIKE:
        text = pattern.sub(alike, text)
    return text


def _rows(files: dict[Path, str]) -> Iterator[tuple[str, list[Any]]]:
    events: dict[str, list[Any]] = {}
    for path, name in files.items():
        if path.name == "metrics.csv":
            with path.open() as file:
                yield name, [{k: v for k, v in row.items() if v} for row in csv.DictReader(file)]
        elif path.parent.name == "metrics" and "mlruns" in path.parts:
            yield name, [line.split()[1:] for line in path.read_text().splitlines()]  # without the time
        elif "tfevents" in path.name:
            events.setdefault(name, []).extend(scalars(path))
    for name, found in events.items():
        yield name, sorted(found)


def scalars(path: Path) -> Iterator[tuple[str, int, float]]:
    """Reads (tag, step, value) from TensorBoard's: records of a length, its checksum, an event, its checksum."""
    from tensorboard.compat.proto.event_pb2 import Event

    data = path.read_bytes()
    at = 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        event = Event.FromString(data[at + 12 : at + 12 + length])
        at += 12 + length + 4
        for value in event.summary.value:
            if value.HasField("simple_value"):
                yield value.tag, event.step, value.simple_value


def _checkpoint(path: Path, work: Path) -> Any:
    return _plain(torch.load(path, map_location="cpu", weights_only=False), str(work))


def _plain(value: Any, work: str) -> Any:
    """Makes a checkpoint comparable: digests for tensors, no absolute paths, no times in names."""
    if isinstance(value, torch.Tensor):
        tensor = value.detach().contiguous()
        digest = hashlib.sha256(tensor.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
        return f"{tensor.dtype} {list(tensor.shape)} {digest}"
    if isinstance(value, dict):
        return {_plain(k, work): _plain(v, work) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, work) for v in value]
    if isinstance(value, str):
        return _alike(value.replace(work, "."))
    return value if isinstance(value, (int, float, bool, type(None))) else repr(type(value))


def _differences(where: str, a: Any, b: Any) -> Iterator[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in [*a, *(key for key in b if key not in a)]:
            if key not in a or key not in b:
                yield f"{where}/{key}: only in the {'second' if key not in a else 'first'}"
            else:
                yield from _differences(f"{where}/{key}", a[key], b[key])
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for number, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _differences(f"{where}/{number}", x, y)
    elif isinstance(a, list) and isinstance(b, list):
        only = [x for x in a if x not in b], [y for y in b if y not in a]
        yield f"{where}: {len(a)} and {len(b)} entries; only in the first {only[0][:5]}, in the second {only[1][:5]}"
    elif a != b and not (a != a and b != b):  # NaN is like NaN
        yield f"{where}: {a!r} and {b!r}"
