"""The loss scale follows megatron-core's own scaler, step by step."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.optimizer import grad_scaler as theirs

from lightning_replica._compat.torch import update_scale
from lightning_replica.errors import ConfigurationError
from lightning_replica.megatron import DynamicGradScaler


def megatrons(**options: Any) -> Any:
    """megatron-core's scaler, which makes its tensors on a GPU."""
    real = torch.tensor
    try:
        torch.tensor = lambda *args, **named: real(*args, **{**named, "device": "cpu"})
        return theirs.DynamicGradScaler(**options)
    finally:
        torch.tensor = real


@given(
    st.lists(st.booleans(), max_size=40),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([1.0, 8.0, 1024.0]),
    st.integers(0, 40),
)
def test_scales_are_megatrons(
    infinities: list[bool], hysteresis: int, interval: int, least: float, saved_after: int
) -> None:
    options: dict[str, Any] = {
        "initial_scale": 1024.0,
        "min_scale": least,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": interval,
        "hysteresis": hysteresis,
    }
    ours, reference = DynamicGradScaler("cpu", **options), megatrons(**options)
    for step, found in enumerate(infinities):
        if step == saved_after:
            saved = ours.state_dict()
            ours = DynamicGradScaler("cpu", **options)
            ours.load_state_dict(saved)
        update_scale(ours, found)
        reference.update(found)
        assert ours.get_scale() == float(reference._scale)
        assert ours.state_dict()["hysteresis_tracker"] == reference._hysteresis_tracker


def test_a_step_of_torch_s_own() -> None:
    """As plain loops use a scaler: infinities that ``unscale_`` finds."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = DynamicGradScaler("cpu", initial_scale=4.0, hysteresis=2, growth_interval=100)
    scales = []
    for factor in (1.0, torch.inf, torch.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale((parameter * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [4.0, 4.0, 2.0, 2.0]


@pytest.mark.parametrize(
    "options", [{"hysteresis": 0}, {"min_scale": 0.0}, {"min_scale": 2.0**40}, {"backoff_factor": 1.0}], ids=str
)
def test_values_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        DynamicGradScaler("cpu", **options)
