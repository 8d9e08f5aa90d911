"""`Fabric(strategy="replica_zero")` against ``Fabric(strategy="ddp")`` with the plain optimizer."""

import pytest
import torch

from tests.fabric.loop import Case, compare
from tests.support.ranks import run_ranks

SGD = {"lr": 0.1, "momentum": 0.9}
CASES = {
    "plain": Case(),
    "momentum": Case(torch.optim.SGD, SGD),
    "groups": Case(groups=True),
    "accumulated": Case(accumulate=3),
    "norm": Case(clip={"max_norm": 0.01}),
    "largest": Case(clip={"max_norm": 0.01, "norm_type": float("inf")}),
    "value": Case(clip={"clip_val": 1e-3}, accumulate=2),
    "after": Case(schedule="after"),
    "before": Case(schedule="before"),
    "closure": Case(closure=True),
    "bf16-mixed": Case(precision="bf16-mixed"),
    "64-true": Case(precision="64-true"),
    "scaled": Case(scaled=True, clip={"max_norm": 0.01, "error_if_nonfinite": False}),
    "sparse": Case(torch.optim.SGD, {"lr": 0.1}, sparse=True),
    "unused": Case(unused=True),
    "whole": Case(torch.optim.Adafactor, {"lr": 0.1}, strategy={"partition": "parameter"}),
    "views": Case(torch.optim.SGD, SGD, strategy={"gradient_as_bucket_view": True}, accumulate=2),
    "sent": Case(strategy={"shared_memory": False}),
}


@pytest.mark.parametrize(("world", "replicas"), [(2, 1), (2, 2), (4, 1), (4, 2)])
def test_weights_and_state_have_the_bits_of_ddp(world: int, replicas: int) -> None:
    assert run_ranks(world, compare, world, replicas, CASES) == [{}] * world


def test_one_rank() -> None:
    assert run_ranks(1, compare, 1, 2, {"plain": Case()}) == [{}]
