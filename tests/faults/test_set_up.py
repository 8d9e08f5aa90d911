"""A replacement's way to the training loop: through collectives that nobody else calls any more."""

from pathlib import Path
from typing import Any

import pytest

from lightning_replica.exit_codes import GAVE_UP
from tests.faults.set_up import SetUp, after_what_cannot_be_sent, found_on_the_way, once, tuned, twice
from tests.support import world


def files(out: Path) -> dict[str, str]:
    """What a run has left: its logs, line by line, and the names of its checkpoints."""
    rows = {str(path.relative_to(out)): path.read_text() for path in out.glob("loop*/**/*.csv")}
    return rows | {str(path.relative_to(out)): "" for path in out.glob("loop*/**/*.ckpt")}


def same(got: tuple[Path, world.Outcome], untouched: tuple[Path, world.Outcome]) -> None:
    assert got[1].code == 0, got[1].logs
    assert got[1].ranks == untouched[1].ranks, got[1].logs
    assert files(got[0]) == files(untouched[0])


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, world.Outcome]:
    out = tmp_path_factory.mktemp("untouched")
    outcome = world.run(SetUp(), out, target=once)
    assert outcome.code == 0, outcome.logs
    assert len(files(out)) == 3
    return out, outcome


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_is_replaced(rank: int, untouched: tuple[Path, world.Outcome], tmp_path: Path) -> None:
    outcome = world.run(SetUp(rank), tmp_path, target=once)
    same((tmp_path, outcome), untouched)
    assert len(outcome.said) == 1, outcome.said
    assert ("broadcast other data than in its predecessor" in outcome.logs) == (rank == 0)


def test_what_does_not_match_is_named(tmp_path: Path) -> None:
    outcome = world.run(SetUp(1, differs="shape"), tmp_path, target=once, max_restarts=1)
    assert outcome.code != 0
    assert "called `all_reduce` on float32[4] in " in outcome.logs
    assert "its predecessor called `all_reduce` on float32[3] in " in outcome.logs
    assert "set_up.py:" in outcome.logs


def test_what_is_left_out_is_named(untouched: tuple[Path, world.Outcome], tmp_path: Path) -> None:
    outcome = world.run(SetUp(1, differs="left out"), tmp_path, target=once)
    same((tmp_path, outcome), untouched)
    assert "left out a call that its predecessor made before the training loop: `all_reduce` on float32[2]" in (
        outcome.logs
    )


@pytest.fixture(scope="module")
def thrice(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, world.Outcome]:
    out = tmp_path_factory.mktemp("thrice")
    outcome = world.run(SetUp(), out, target=twice)
    assert outcome.code == 0, outcome.logs
    return out, outcome


@pytest.mark.parametrize(("rank", "loop"), [(0, 2), (1, 3), (1, 1), (0, 3)])
def test_a_rank_is_replaced_in_a_later_fit(
    rank: int, loop: int, thrice: tuple[Path, world.Outcome], tmp_path: Path
) -> None:
    outcome = world.run(SetUp(rank, loop), tmp_path, target=twice)
    same((tmp_path, outcome), thrice)
    assert len(outcome.said) == 1, outcome.said


@pytest.mark.parametrize("target", [tuned, found_on_the_way])
def test_a_search_for_a_learning_rate(target: Any, tmp_path: Path) -> None:
    untouched = tmp_path / "untouched", world.run(SetUp(), tmp_path / "untouched", target=target)
    assert untouched[1].code == 0, untouched[1].logs
    for rank, loop in ((1, 1), (0, 2)):
        out = tmp_path / f"{rank} {loop}"
        outcome = world.run(SetUp(rank, loop), out, target=target)
        same((out, outcome), untouched)
        assert len(outcome.said) == 1, outcome.said


def test_where_no_replacement_can_come_none_is_started(tmp_path: Path) -> None:
    outcome = world.run(SetUp(1, 2), tmp_path, target=after_what_cannot_be_sent)
    assert outcome.code == GAVE_UP
    said = "Rank 1 died (SIGKILL), and it cannot be replaced: this script has trained before."
    assert [line[: len(said)] for line in outcome.said] == [said]
    assert "'precision' of the trainer's state cannot be sent, it holds tests.faults.set_up.Opaque" in outcome.said[0]
