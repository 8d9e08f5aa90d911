"""``lightning-replica plan`` for models that are divided among ranks."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_replica.__main__ import main
from lightning_replica.cli.losses import by_rank
from lightning_replica.megatron.sizes import ParallelSizes

JOB = ["plan", "--ranks", "16", "--params", "1.6M", "--json"]


def planned(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main([*JOB, *options]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@given(*(st.integers(1, 3) for _ in range(5)))
def test_holders_are_those_of_the_grids(tensor: int, pipeline: int, context: int, expert: int, replicas: int) -> None:
    ranks = tensor * pipeline * context * expert * replicas
    grids = ParallelSizes(tensor, pipeline, context, expert).grids(ranks, replicas, 1)
    held = {frozenset(grids.peers(rank)) for rank in range(ranks)}
    assert by_rank(ranks, replicas, pipeline).groups == held


def test_a_rank_has_a_part_of_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    whole = planned(capsys)
    part = planned(capsys, "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "4")
    assert whole["memory_bytes"]["DDP"]["parameters"] == 8 * part["memory_bytes"]["DDP"]["parameters"]
    assert part["division"]["parameters_of_a_rank"] == 200_000
    # N = 2 and R = 2: gradients are reduced, and nothing is gathered
    assert part["sent_bytes_per_step"]["replica_zero"] == 200_000 * 4 * (2 + 2 - 2) / 2


def test_experts(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--expert-model-parallel-size", "4", "--expert-params", "0.8M")
    found = planned(capsys, *options)
    assert found["division"]["parameters_of_a_rank"] == 800_000 + 200_000
    rest, experts = 800_000 * 4 * (16 + 0 + 16 - 2) / 16, 200_000 * 4 * (4 + 0 + 4 - 2) / 4  # N = 16 and N = 4, R = 2
    assert found["sent_bytes_per_step"]["replica_zero"] == rest + experts


def test_what_leaves_a_node_of_a_stage(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--nodes", "4", "--pipeline-model-parallel-size", "2")
    assert found["leaving_bytes_per_step"]["replica_zero"] == 800_000 * 4  # two nodes, each with a replica of a half
    assert found["node_losses"]["always_survived"] == 1


def test_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB[:-1], "--tensor-model-parallel-size", "2"]) == 0
    said = capsys.readouterr().out
    assert "Every rank has 800,000 of them: tensor_model_parallel_size=2." in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--tensor-model-parallel-size", "3"), "does not divide world_size=16"),
        (("--expert-model-parallel-size", "16"), "replicas=2 does not divide the 1 ranks that have the same experts"),
        (("--expert-model-parallel-size", "2", "--expert-params", "1.6M"), "must be less than params=1600000"),
    ],
)
def test_sizes_that_do_not_fit(options: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB, *options]) != 0
    assert said in "".join(capsys.readouterr())
