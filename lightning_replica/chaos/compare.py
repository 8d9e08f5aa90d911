"""Whether two runs are the same to the last bit: compares what `callbacks.Fingerprint` wrote of each."""

import json
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_replica.errors import ConfigurationError

_NAMED = 20  # objects in one line
Batch = tuple[int, int, int]  # fit, epoch, number
Step = tuple[int, int]  # fit, step
_NAMES = {
    "weights": "weights",
    "shard": "main parameters of the shard",
    "optimizer": "optimizer state of the shard",
    "random": "random numbers",
    "schedulers": "schedulers",
    "metrics": "metrics",
    "progress": "progress",
}


@dataclass(frozen=True)
class RankPrint:
    """The fingerprints that one rank has written.

    Attributes:
        world: Number of ranks.
        batches: Hashes of the data of each batch: one, unless a batch had other data when it was done again.
        steps: Hashes of the state after each step, in the order of writing; several if the step's tail was done again.
        ends: Hashes of the state at the end of each fit.
        objects: Digests of the user's objects by name, after a step or at the "end".
        begun: When the first process of this rank began its fit, as `time.time` gives it.
    """

    world: int
    begun: float = 0.0
    batches: dict[Batch, set[str]] = field(default_factory=lambda: defaultdict(set))
    steps: dict[Step, list[Hashable]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[int, dict[str, Any]] = field(default_factory=dict)
    objects: dict[tuple[int, int | str], dict[str, str]] = field(default_factory=dict)

    @property
    def last_step(self) -> int:
        """The last step that was made in the first fit; 0 if there is none."""
        steps = [step for fit, step in self.steps if fit == 0]
        return max([*steps, *(end["end"] for fit, end in self.ends.items() if fit == 0)], default=0)


def read(folder: Path) -> list[RankPrint]:
    """Return what the ranks of a run have written to ``folder``, by rank.

    Raises:
        ConfigurationError: If the fingerprints of any rank are missing.
    """
    first = folder / "rank0.jsonl"
    if not first.exists():
        raise ConfigurationError(f"{folder} holds no fingerprints: no fit with `strategy='replica_zero'` has begun.")
    prints = [_rank(first)]
    for rank in range(1, prints[0].world):
        path = first.with_name(f"rank{rank}.jsonl")
        if not path.exists():
            raise ConfigurationError(f"{path} is missing: rank {rank} has not begun its fit.")
        prints.append(_rank(path))
    return prints


def _rank(path: Path) -> RankPrint:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    found = RankPrint(records[0]["world"], records[0].get("time", 0.0))
    for record in records:
        fit = record.pop("fit")
        if "batch" in record:
            epoch, number = record["batch"]
            found.batches[(fit, epoch, number)].add(record["data"])
        elif "objects" in record:
            found.objects[(fit, record["at"])] = record["objects"]
        elif "step" in record:
            found.steps[(fit, record.pop("step"))].append(tuple(sorted(record.items())))
        elif "end" in record:
            found.ends[fit] = record
    return found


def differences(
    untouched: list[RankPrint],
    hurt: list[RankPrint],
    cut_short: bool = False,
    flipped: bool = False,
    varying: Collection[str] = (),
) -> list[str]:
    """Return what differs between two runs, in words; an empty list if they are the same.

    Args:
        untouched: The untouched run.
        hurt: The run with faults.
        cut_short: Whether the run with faults was told to stop early. Then it must equal the beginning of the other.
        flipped: Whether bits were flipped in the run with faults. Then a state that was hashed before the flip was
            found does not count: the tail in which it was hashed is done again, and the state is hashed again.
        varying: Names of objects that differ between untouched runs, too.
    """
    if len(untouched) != len(hurt):
        return [f"{len(hurt)} ranks instead of {len(untouched)}"]
    found = []
    for rank, (left, right) in enumerate(zip(untouched, hurt, strict=True)):
        texts = [*_batches(left, right, cut_short), *_steps(left, right, cut_short, flipped)]
        texts += [] if cut_short else _ends(left, right)
        texts += _objects(left, right, varying)
        found += [f"rank {rank}: {text}" for text in texts]
    return found


def resumed_differences(
    untouched: list[RankPrint], stopped: list[RankPrint], resumed: list[RankPrint], varying: Collection[str] = ()
) -> list[str]:
    """Return what differs between an untouched run and one that was stopped and resumed from its checkpoint, in words.

    Steps are counted anew in a run that resumes, so the batches of both parts and the ends are compared.

    Args:
        untouched: The untouched run.
        stopped: The run that was stopped.
        resumed: The run that has resumed.
        varying: See `differences`.
    """
    if not len(untouched) == len(stopped) == len(resumed):
        return [f"{len(stopped)} and {len(resumed)} ranks instead of {len(untouched)}"]
    found = []
    for rank, (whole, first, second) in enumerate(zip(untouched, stopped, resumed, strict=True)):
        both = RankPrint(whole.world, batches={**first.batches})
        for batch, seen in second.batches.items():
            both.batches[batch] = seen | both.batches.get(batch, set())
        both.ends.update({fit: {**end, "end": whole.ends.get(fit, end)["end"]} for fit, end in second.ends.items()})
        texts = [*_batches(whole, both, cut_short=False), *_ends(whole, both)]
        if texts:  # what a checkpoint does not hold may be the cause
            end = {at: objects for at, objects in second.objects.items() if at[1] == "end"}
            texts += _objects(whole, RankPrint(whole.world, objects=end), varying)
        found += [f"rank {rank}: {text}" for text in texts]
    return found


def varying_objects(one: list[RankPrint], other: list[RankPrint]) -> set[str]:
    """Return the names of the objects that differ between two untouched runs, as what keeps times does."""
    return {
        name
        for left, right in zip(one, other, strict=True)
        for at, objects in left.objects.items()
        for name in _unlike(objects, right.objects.get(at, {}))
    }


def _unlike(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return [name for name in dict.fromkeys((*one, *other)) if one.get(name) != other.get(name)]


def _objects(untouched: RankPrint, hurt: RankPrint, varying: Collection[str]) -> list[str]:
    """Name what differs for the first time, in the order of the steps."""
    found: dict[str, str] = {}
    for (fit, at), objects in untouched.objects.items():
        when = f"at the end{_of(fit)}" if at == "end" else f"after step {at}{_of(fit)}"
        for name in _unlike(objects, hurt.objects.get((fit, at), objects)):
            if name not in varying:
                found.setdefault(name, when)
    by_time: dict[str, list[str]] = {}
    for name, when in found.items():
        by_time.setdefault(when, []).append(name)
    return _few([f"different {_listed(names)} {when}" for when, names in by_time.items()], "steps")


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more objects" if more > 0 else "")


def _batches(untouched: RankPrint, hurt: RankPrint, cut_short: bool) -> list[str]:
    found = []
    for batch, seen in hurt.batches.items():
        expected = untouched.batches.get(batch)
        if expected is None:
            found.append(f"{_name(batch)} was not seen in the untouched run")
        elif seen != expected:
            again = ", when it was repeated," if expected & seen else ""
            found.append(f"{_name(batch)}{again} had different data")
    skipped = [batch for batch in untouched.batches if batch not in hurt.batches]
    if cut_short:
        last = max(hurt.batches, default=(-1, -1, -1))
        skipped = [batch for batch in skipped if batch < last]
    found += [f"{_name(batch)} was skipped" for batch in skipped]
    return _few(found, "batches")


def _steps(untouched: RankPrint, hurt: RankPrint, cut_short: bool, flipped: bool) -> list[str]:
    seen = {step: set(states[-1:] if flipped else states) for step, states in hurt.steps.items()}
    expected = {step: set(states) for step, states in untouched.steps.items()}
    wrong = sorted(step for step, states in seen.items() if states != expected.get(step))
    missing = [] if cut_short else sorted(step for step in untouched.steps if step not in hurt.steps)
    found = []
    if wrong:
        fit, step = wrong[0]
        states = seen[wrong[0]] | expected.get(wrong[0], set())
        names = _differing([dict(state) for state in states])  # type: ignore[call-overload]
        found.append(f"{names} after step {step}{_of(fit)} ({len(wrong)} of {len(hurt.steps)} states differ)")
    if missing:
        found.append(f"step {missing[0][1]}{_of(missing[0][0])} is missing, and {len(missing) - 1} more")
    return found


def _ends(untouched: RankPrint, hurt: RankPrint) -> list[str]:
    found = []
    for fit, end in untouched.ends.items():
        if fit not in hurt.ends:
            found.append(f"the end{_of(fit)} was not reached")
        elif end != hurt.ends[fit]:
            found.append(f"{_differing([end, hurt.ends[fit]])} at the end{_of(fit)}")
    return found


def _differing(states: list[Mapping[str, Any]]) -> str:
    """Name what is not the same in all of ``states``."""
    names = [text for key, text in _NAMES.items() if len({str(state.get(key)) for state in states}) > 1]
    return f"different {', '.join(names)}" if names else "a different number of steps"


def _name(batch: Batch) -> str:
    return f"batch {batch[2]} of epoch {batch[1]}{_of(batch[0])}"


def _of(fit: int) -> str:
    return f" of fit {fit + 1}" if fit else ""


def _few(texts: list[str], what: str) -> list[str]:
    return texts if len(texts) <= 3 else [*texts[:2], f"{len(texts) - 2} more {what} like these"]
