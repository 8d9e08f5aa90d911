"""Loss scaling by megatron-core's rules."""

from typing import Any

import torch

from lightning_replica._compat.torch import found_inf, set_scale
from lightning_replica.core import checks
from lightning_replica.errors import ConfigurationError


class DynamicGradScaler(torch.amp.GradScaler):
    """A loss scale that shrinks only after several infinities, as megatron-core's scaler of the same name.

    Give it to Lightning's plugin: ``MixedPrecision("16-mixed", device, DynamicGradScaler(device))``.

    The rules (``megatron/core/optimizer/grad_scaler.py``): each step with an infinity or a NaN takes one from the
    hysteresis and begins the growth interval anew. From 0 on, each of them shrinks the scale. A whole growth interval
    without one grows the scale and restores the hysteresis.

    Args:
        device: The type of the device that trains, as in torch's scaler.
        initial_scale: The scale to begin with.
        min_scale: The smallest scale.
        growth_factor: What the scale is multiplied by after a growth interval.
        backoff_factor: What it is multiplied by where it shrinks.
        growth_interval: Number of steps without an infinity before it grows.
        hysteresis: Number of steps with one before it shrinks.

    Raises:
        ConfigurationError: If a value makes no sense.
    """

    def __init__(
        self,
        device: str,
        initial_scale: float = 2.0**32,
        min_scale: float = 1.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
    ) -> None:
        checks.whole(1, growth_interval=growth_interval, hysteresis=hysteresis)
        if not (0 < min_scale <= initial_scale and growth_factor > 1 and 0 < backoff_factor < 1):
            raise ConfigurationError(
                f"{initial_scale=}, {min_scale=}, {growth_factor=}, {backoff_factor=}: the smallest scale must be"
                " positive and at most the initial one, growth_factor above 1, and backoff_factor between 0 and 1."
            )
        super().__init__(device, initial_scale, growth_factor, backoff_factor, growth_interval)
        self._min_scale, self._hysteresis = min_scale, hysteresis
        self._steps_left = hysteresis  # with an infinity, before the scale shrinks
        self._good_steps = 0

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Grow or shrink the scale after a step, or set it to ``new_scale``."""
        found = found_inf(self)
        if new_scale is not None:
            set_scale(self, float(new_scale))
        elif found:
            self._good_steps = 0
            self._steps_left -= 1
            if self._steps_left <= 0:
                set_scale(self, max(self.get_scale() * self.get_backoff_factor(), self._min_scale))
        else:
            self._good_steps += 1
            if self._good_steps == self.get_growth_interval():
                self._good_steps, self._steps_left = 0, self._hysteresis
                set_scale(self, self.get_scale() * self.get_growth_factor())

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, and how far growth and hysteresis have come."""
        return {"scale": self.get_scale(), "growth_tracker": self._good_steps, "hysteresis_tracker": self._steps_left}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` has returned. megatron-core's states have the same entries."""
        set_scale(self, float(state_dict["scale"]))
        self._good_steps = int(state_dict["growth_tracker"])
        self._steps_left = int(state_dict["hysteresis_tracker"])
