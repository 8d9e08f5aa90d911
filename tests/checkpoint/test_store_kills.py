"""Killed at every request that changes a store, and with no room from every one on: nothing wrong is ever loaded."""

import itertools
import os
import signal
from typing import Any

import pytest

from lightning_replica.checkpoint.attempts import attempts_at
from lightning_replica.checkpoint.directory import CheckpointDirectory
from tests.checkpoint.small import directory_of
from tests.checkpoint.test_kills import VALUES, in_child, state, story
from tests.support.bucket import Trouble, changes, settings, trouble
from tests.support.ranks import run_ranks
from tests.support.typed import in_store


def whole(directory: CheckpointDirectory) -> set[str]:
    """The names of all checkpoints."""
    entries = list(directory.entries(verify=True))
    assert not [entry.problem for entry in entries if entry.problem]
    return {entry.path.name for entry in entries}


def unfinished(directory: CheckpointDirectory) -> bool:
    return any(attempt.given_up for step in (1, 2) for attempt in attempts_at(in_store(directory.path_of(step))))


def ever_after(
    rank: int, store: Any, url: str, what: Trouble, every: int, environment: dict[str, str]
) -> dict[str, Any]:
    """Tells the story with trouble at the first request, then ``every`` requests later, until it comes to its end."""
    os.environ.update(environment)
    found, expected = [], -signal.SIGKILL if what == "killed" else 1
    for number in itertools.count(1, every):
        directory = directory_of(f"{url}/{number}", 1)

        def tells(number: int = number, directory: CheckpointDirectory = directory) -> None:
            trouble(what, number)
            story(directory)

        ended = in_child(tells)
        told = changes()
        trouble("refused", 1 << 30)  # never
        found.append(state(directory))
        assert what != "full" or not unfinished(directory), "a save that fails removes what it wrote"
        before = whole(directory)
        directory.prepare()
        assert state(directory) == found[-1], "tidying up"
        assert not unfinished(directory)
        assert whole(directory) == before <= {"step_00000001", "step_00000002"}
        if ended == 0:
            return {"found": found, "changes": told}
        assert ended == expected, (number, ended)
        story(directory)
        assert state(directory) == VALUES[-1]
        assert whole(directory) == {"step_00000002"}
    raise AssertionError


def assert_nothing_wrong(bucket: str, what: Trouble, every: int) -> None:
    (result,) = run_ranks(1, ever_after, bucket, what, every, settings(), timeout_s=220)
    assert "found" in result, result.get("raised", result)
    assert result["found"] == sorted(result["found"]), "what was published stays"
    assert sorted(set(result["found"])) == VALUES
    if what == "killed":
        assert len(result["found"]) == -(-len(result["changes"]) // every) + 1


@pytest.mark.parametrize("what", ["killed", pytest.param("full", marks=pytest.mark.combinations)])
def test_trouble_at_every_fourth_request_that_changes_the_store(what: Trouble, bucket: str) -> None:
    assert_nothing_wrong(bucket, what, 4)


@pytest.mark.combinations
@pytest.mark.parametrize("what", ["killed", "full"])
def test_trouble_at_every_request_that_changes_the_store(what: Trouble, bucket: str) -> None:
    assert_nothing_wrong(bucket, what, 1)
