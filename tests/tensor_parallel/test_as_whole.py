"""The same model without tensor parallelism, on as many data parallel ranks: the same norms and weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import world
from tests.support.world import Outcome
from tests.tensor_parallel import job
from tests.tensor_parallel.job import make


def train(case: job.Case, out: Path) -> Outcome:
    outcome = world.run(case, out, target=job.run)
    assert outcome.code == 0, outcome.logs
    return outcome


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"width": 5, "accumulate": 2, "shared_memory": False},  # 3 columns on the first tensor rank, 2 on the second
        {"whole_gradients": True},
        {"whole_gradients": True, "clip_by": "value"},
        {"width": 1, "clip": None, "adagrad": True},  # nothing of it on the second
    ],
    ids=str,
)
def test_a_divided_model_trains_as_the_whole_one(tmp_path: Path, options: dict[str, Any]) -> None:
    """Sums are made in another order, so not to the last bit."""
    case = make(plain=True, **options)
    whole = train(replace(case, tensor=1, devices=2), tmp_path / "whole").ranks[0]
    divided = train(case, tmp_path / "divided").ranks
    for rank in divided:
        assert rank["norms"] == divided[0]["norms"]
        assert rank["shared"] == divided[0]["shared"], "what tensor ranks have in common stays the same"
        for ours, theirs in zip([rank["norms"], *rank["values"]], [whole["norms"], *whole["values"]], strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-5, atol=1e-6)
