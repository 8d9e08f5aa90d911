"""Kinds of state, one by one, on one rank: it goes back, and another one takes its place."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.state.kinds import ALONE, KINDS
from tests.support.ranks import free_port

TOLD = {
    "Generates": "module.numbers",
    "Row": "module.row",
    "BytesOfAnArray": "module.shown",
    "Flag": "module.flag._flag",
    "NoValueYet": "module.current",
    "OpenBlock": "module.block.gen",
    "OwnLogger": "module.own_logger",
}
BUFFERS = ("OneBufferTwice", "LearningBuffer", "OfInference")  # in which ranks differ until the next forward pass
OF_ALL = ("TensorRate", "RateOfNumPy")  # recovery ends if ranks differ in param groups
# On Python 3.14, a count of itertools cannot be made again.
COUNTS = ("Vocabulary", "Defaults") if sys.version_info >= (3, 14) else ()
ENVIRONMENT = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "GROUP_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "TORCHELASTIC_RUN_ID": "kinds",
    "TORCHELASTIC_RESTART_COUNT": "0",
}


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    """Returns what became of each kind."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.state.kinds"],
        env={**os.environ, **ENVIRONMENT, "MASTER_PORT": str(free_port())},
        capture_output=True,
        text=True,
        timeout=240,
    )
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(KINDS), ended.stdout + ended.stderr
    return {line["kind"]: line for line in lines}


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_goes_back(kind: str, found: dict[str, dict[str, Any]]) -> None:
    state = found[kind]
    assert state["before"] != state["after"]
    if kind in TOLD:
        assert state["told"] == [TOLD[kind]]
    elif kind in COUNTS:
        assert [each.rpartition(".")[2] for each in state["told"]] == ["__self__"]
    else:
        assert (state["back"], state["again"], state["told"]) == (state["before"], state["after"], [])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in (*ALONE, *TOLD, *COUNTS)])
def test_another_rank_takes_its_place(kind: str, found: dict[str, dict[str, Any]]) -> None:
    state = found[kind]
    assert (state["joined"], state["joined_then"]) == (state["before"], state["after"])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in (*ALONE, *TOLD, *COUNTS, *BUFFERS, *OF_ALL)])
def test_what_differs_between_ranks_is_its_predecessor_s(kind: str, found: dict[str, dict[str, Any]]) -> None:
    state = found[kind]
    assert (state["apart"], state["apart_then"], state["apart_told"]) == (state["before"], state["after"], [])
