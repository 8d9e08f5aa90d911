"""Callbacks that are told of a recovery: when, where, and what happens if they fail themselves."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.callbacks.training import PHASES, Hooked, train
from tests.support import world
from tests.support.job import Fault


def told(out: Path, rank: int) -> list[list[Any]]:
    return [json.loads(line) for line in (out / f"hooks{rank}").read_text().splitlines()]


def seen(out: Path) -> list[Any]:
    return [json.loads((out / f"seen{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, world.Outcome]:
    out = tmp_path_factory.mktemp("untouched")
    outcome = world.run(Hooked(devices=2), out, target=train)
    assert outcome.code == 0, outcome.logs
    assert not list(out.glob("hooks*"))
    assert not (out / "recovery.jsonl").exists()
    assert len(seen(out)[0]) == 24
    return out, outcome


def test_on_all_ranks_in_order_with_own_state_and_group(untouched: tuple[Path, world.Outcome], tmp_path: Path) -> None:
    case = Hooked(faults=(Fault("kill", 1, "backward", 2),), devices=2)
    outcome = world.run(case, tmp_path, target=train)
    outcome.assert_same(untouched[1])
    assert seen(tmp_path) == seen(untouched[0])
    for rank in range(2):
        lines = told(tmp_path, rank)
        assert [line[0] for line in lines][-7:] == [*PHASES, "incident"]
        last = {line[0]: line[1:] for line in lines[-7:]}
        assert [last[phase][1] for phase in PHASES] == [rank == 1] * 6  # is_replacement
        assert [last[phase][2] for phase in PHASES] == [None, None, None, 2, 2, 2]
        assert [last[phase][3] for phase in PHASES] == [[], [], [1], [1], [1], [1]]
        assert len({last[phase][4] for phase in PHASES}) == 1  # one process


@pytest.mark.parametrize(
    ("fails", "kind"),
    [
        (((0, "regroup", 1, "exception"),), "exception"),  # the other is about to open its group
        (((1, "repair", 2, "exception"), (0, "resume", 1, "exception")), "kill"),  # the replacement; then the other
        (((0, "clean", 1, "exception"), (1, "rollback", 1, "exception")), "exception"),
        (((1, "repair", 1, "kill"),), "exception"),  # the other waits for it in a collective of its hook
    ],
    ids=["regroup", "replacement", "both", "killed"],
)
def test_a_hook_that_fails_now_and_then(
    fails: Any, kind: str, untouched: tuple[Path, world.Outcome], tmp_path: Path
) -> None:
    case = Hooked(faults=(Fault(kind, 1, "backward", 2),), fails=fails, devices=2)
    outcome = world.run(case, tmp_path, target=train)
    outcome.assert_same(untouched[1])
    assert seen(tmp_path) == seen(untouched[0])
    raising = [phase for _, phase, _, how in fails if how == "exception"]
    for phase in raising:
        said = f"a recovery hook failed: Recorder.on_recovery_{phase}: ValueError: the hook of {phase} fails"
        assert outcome.logs.count(f"{said}\nTraceback") == 1, outcome.logs
    assert outcome.logs.count("a recovery hook failed") == len(raising)
    assert outcome.logs.count("replica_zero: recovered at step 2") == 1


@pytest.mark.parametrize("ranks", [(0,), (0, 1)])
def test_a_hook_that_fails_when_it_is_told_of_an_incident(
    ranks: tuple[int, ...], untouched: tuple[Path, world.Outcome], tmp_path: Path
) -> None:
    """Training goes on, and the callbacks after it are told."""
    faults = (Fault("exception", 1, "backward", 2), Fault("kill", 1, "gather", 3))
    case = Hooked(faults=faults, fails=tuple((rank, "incident", 99, "exception") for rank in ranks), devices=2)
    outcome = world.run(case, tmp_path, target=train)
    outcome.assert_same(untouched[1])
    assert seen(tmp_path) == seen(untouched[0])
    assert [line[1] for line in told(tmp_path, 0) if line[0] == "incident"] == [1, 2]
    assert len((tmp_path / "recovery.jsonl").read_text().splitlines()) == 2
    said = "a callback failed when it was told of an incident: Recorder.on_incident: ValueError: the hook of incidents"
    shown = [outcome.logs.partition("--- rank 1")[place].count(said) for place in (0, 2)]
    assert shown[0] == 1  # once in a process
    assert shown[1] <= 2 * (1 in ranks)  # rank 1 has two


@pytest.mark.parametrize(("rank", "kind"), [(0, "exception"), (1, "kill")])
def test_a_hook_that_always_fails(rank: int, kind: str, tmp_path: Path) -> None:
    case = Hooked(faults=(Fault(kind, 1, "backward", 2),), fails=((rank, "rollback", 99, "exception"),), devices=2)
    outcome = world.run(case, tmp_path, target=train)
    assert outcome.code == 1
    said = (
        "A recovery hook has failed 3 times (max_tries=3) at step 2."
        f" rank {rank}: Recorder.on_recovery_rollback: ValueError: the hook of rollback fails"
    )
    assert outcome.logs.count(f"replica_zero: recovery failed at step 2: {said}") == 1, outcome.logs
    assert (tmp_path / "failed0").read_bytes() == b"xxx"


@pytest.mark.parametrize("kind", ["exception", "kill"])
def test_a_process_group_outlives_recoveries(kind: str, untouched: tuple[Path, world.Outcome], tmp_path: Path) -> None:
    """The callback makes it when training begins, and no hook makes it anew."""
    case = Hooked(faults=(Fault(kind, 1, "backward", 2),), regroups=False, devices=2)
    outcome = world.run(case, tmp_path, target=train)
    outcome.assert_same(untouched[1])
    if kind == "exception":  # what a replacement has seen comes to it by a hook's own broadcast
        assert seen(tmp_path) == seen(untouched[0])
