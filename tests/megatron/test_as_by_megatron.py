"""Norms and weights are those of megatron-core's own distributed optimizer."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron import by_megatron, job
from tests.megatron.job import Case
from tests.support import world
from tests.support.ranks import run_ranks

# What is divided, number of ranks, and how often megatron shards the state over all data parallel ranks.
CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "tp": ({"tensor": 2}, 4, 1),
    "tp-sp-accumulation": ({"tensor": 2, "sequence": True, "accumulate": 2, "epochs": 10}, 4, 1),
    "pp-accumulation": ({"pipeline": 2, "accumulate": 2, "epochs": 10}, 4, 1),
    "pp-uneven": ({"pipeline": 2, "uneven": True}, 4, 1),
    "ep": ({"expert": 2}, 4, 1),
    "two-instances": ({}, 4, 2),
}


@pytest.mark.parametrize("name", CASES)
def test_twenty_steps(tmp_path: Path, name: str) -> None:
    """Sums are made in another order, so not to the last bit."""
    divided, ranks, instances = CASES[name]
    case = Case(**{"devices": ranks, "accumulate": 1, "epochs": 5, "plain": True, **divided})
    expected = run_ranks(case.devices, by_megatron.train, case, instances)
    assert all("raised" not in each for each in expected), expected
    outcome = world.run(case, tmp_path, target=job.run)
    assert outcome.code == 0, outcome.logs
    for rank, found in enumerate(outcome.ranks):
        norms, zeros = (found[name][case.accumulate - 1 :: case.accumulate] for name in ("norms", "zeros"))
        assert len(norms) == 20
        assert norms == pytest.approx(expected[rank]["norms"], rel=1e-5)
        # The gradient of the keys' bias is rounding errors, some of which are zero; experts come without biases.
        assert zeros == pytest.approx(expected[rank]["zeros"], abs=0 if case.expert > 1 else 48)
        for ours, theirs in zip(found["values"], expected[rank]["weights"], strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-5, atol=1e-6)
