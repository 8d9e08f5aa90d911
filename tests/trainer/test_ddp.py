"""Whatever trains under DDP trains under replica_zero: with two ranks, to the same bits."""

from pathlib import Path
from typing import Any

import pytest

from tests.trainer import both
from tests.trainer.scenarios import SCENARIOS

# The norm is added up piece by piece instead of parameter by parameter, which moves the last bit of what it scales.
CLIPPED = {"clip_norm", "fused", "unused", "dtypes_and_shapes", "double", "bf16_mixed", "half_mixed"}
CLIPPED |= {"gradients_seen_by_functions", "own_clipping", "half_mixed_seen", "manual"}
# DDP updates 16-bit weights in 16 bits; replica_zero keeps main parameters of 32 bits. One bit of bf16 is 2**-8.
ROUNDED = {"bf16_true"}
# DDP never reduces gradients of parameters that were frozen when it wrapped the module: its ranks drift apart.
DDP_IS_WRONG = {"finetuning", "thawed_at_the_start"}
NAMES = [name for name in SCENARIOS if name not in DDP_IS_WRONG]
EXACT = [name for name in NAMES if name not in CLIPPED | ROUNDED]
PARTS = 4
PARAMETERS = EXACT[::3]  # of the others only the default partition is compared; test_scenarios has both


def check(name: str, ddp: dict[str, Any], ours: dict[str, Any], limit: float = 0.0) -> None:
    limit = max(limit, 1e-6 if name in CLIPPED else 2**-6 if name in ROUNDED else 0.0)
    if limit == 0:
        assert both.different(ours, ddp) == [], name
        return
    for key, value in ddp["tensors"].items():
        assert float((value - ours["tensors"][key]).abs().max() if value.numel() else 0) <= limit, (name, key)
    assert ours["plain"]["steps"] == ddp["plain"]["steps"]
    assert ours["plain"]["precision"] == ddp["plain"]["precision"]


def test_what_the_readme_counts() -> None:
    assert set(SCENARIOS) >= CLIPPED | ROUNDED | DDP_IS_WRONG
    assert f"{len(EXACT)} trainings" in (Path(__file__).parents[2] / "README.md").read_text()


@pytest.mark.parametrize("part", range(PARTS))
def test_two_ranks_end_with_the_bits_of_ddp(part: int, tmp_path: Path) -> None:
    by_parameter: dict[str, Any] = {"partition": "parameter"}
    options = {name: [{}, *([by_parameter] if name in PARAMETERS else [])] for name in NAMES[part::PARTS]}
    for name, (ddp, ours) in both.compare(options, tmp_path).items():
        for each in ours:
            check(name, ddp, each)


def test_gradients_are_whole_where_code_reads_them_after_the_update(tmp_path: Path) -> None:
    """With two holders of each of two shards, every gradient is whole anyway."""
    name = "gradients_seen_after_the_update"
    ddp, (ours,) = both.compare({name: [{"replicas": 1}]}, tmp_path)[name]
    check(name, ddp, ours)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_four_ranks_differ_in_the_order_of_summation_only(replicas: int, tmp_path: Path) -> None:
    names = ["plain", "accumulation", "momentum", "unused", "gan", "images_with_batch_norm", "own_clipping"]
    for name, (ddp, (ours,)) in both.compare(dict.fromkeys(names, [{"replicas": replicas}]), tmp_path, 4).items():
        check(name, ddp, ours, limit=2e-5 if name == "gan" else 2e-6)


def test_parameters_that_thaw_are_trained_alike_on_all_ranks(tmp_path: Path) -> None:
    ddp, (ours,) = both.compare({"finetuning": [{}]}, tmp_path)["finetuning"]
    assert ours["plain"]["steps"] == ddp["plain"]["steps"]
    assert ours["plain"]["rates"] == ddp["plain"]["rates"]
