"""Norms and weights are those of megatron-core's own distributed optimizer."""

from pathlib import Path

import pytest
import torch

from tests.megatron import by_megatron, job
from tests.megatron.job import Case
from tests.support import world
from tests.support.ranks import run_ranks

# TP, PP, EP, data parallel ranks, and how often megatron shards the state over all of them
SIZES = [(2, 1, 1, 2, 1), (1, 2, 1, 2, 1), (1, 1, 2, 4, 1), (1, 1, 1, 4, 2)]


@pytest.mark.parametrize(("tensor", "pipeline", "expert", "data", "instances"), SIZES)
def test_twenty_steps(tmp_path: Path, tensor: int, pipeline: int, expert: int, data: int, instances: int) -> None:
    """Sums are made in another order, so not to the last bit."""
    case = Case(
        devices=tensor * pipeline * data,
        accumulate=1,
        epochs=5,
        tensor=tensor,
        pipeline=pipeline,
        expert=expert,
        plain=True,
    )
    expected = run_ranks(case.devices, by_megatron.train, case, instances)
    assert all("raised" not in each for each in expected), expected
    outcome = world.run(case, tmp_path, target=job.run)
    assert outcome.code == 0, outcome.logs
    for rank, found in enumerate(outcome.ranks):
        assert len(found["norms"]) == 20
        assert found["norms"] == pytest.approx(expected[rank]["norms"], rel=1e-5)
        # The gradient of the keys' bias is rounding errors, some of which are zero; experts come without biases.
        assert found["zeros"] == pytest.approx(expected[rank]["zeros"], abs=0 if expert > 1 else 32)
        for ours, theirs in zip(found["values"], expected[rank]["weights"], strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-5, atol=1e-6)
