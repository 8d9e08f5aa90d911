"""Lightning's precision plugins, with a sharded optimizer step."""

import math
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch.optim import Optimizer

from lightning_replica._compat.dtensor import local_of
from lightning_replica._compat.lightning import device_is_a_guess
from lightning_replica._compat.lightning_names import Accelerator, Precision
from lightning_replica._compat.torch import device_of_scaler, update_scale
from lightning_replica.errors import ConfigurationError
from lightning_replica.sharding.engine import Commit, Request


class Stepper(Protocol):
    """An object that makes the sharded steps. `steps.Training` is one."""

    whole_gradients: bool

    def unscale(self, optimizer: Optimizer, scale: float) -> None:
        """Divide the whole gradient of an optimizer by ``scale``."""

    def clip(self, optimizer: Optimizer, limit: float) -> None:
        """Scale the whole gradient of an optimizer to a 2-norm of at most ``limit``."""

    def step(self, optimizer: Optimizer, request: Request) -> None:
        """Reduce the gradient, commit, update the shard and gather the parameters."""


class ShardedStep(Precision):
    """A mixin for precision plugins that replaces their optimizer step with the sharded one.

    The gradient norm is known only once all ranks have met. So clipping is recorded when Lightning asks for it, and
    applied to the shard's gradient in the update. Loss scaling works likewise, with the infinities that any rank has
    found. Where gradients are whole, both are done at once, as under DDP.

    Attributes:
        gradient: What the newest commit says of the whole model's gradient: its 2-norm, without the loss scale, and how
            many of its elements are zero, if they are counted. It is a part of every snapshot.
    """

    gradient: tuple[float | None, float | None] = (None, None)

    def attach(self, stepper: Stepper) -> None:
        """Use ``stepper`` from now on."""
        self._stepper = stepper
        self._request = Request()

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the closure and the hooks after it, then the sharded step in place of ``optimizer.step``."""
        result = closure()
        scaler = self.enabled_scaler()
        self._request = Request()
        if scaler is not None:
            scale = float(scaler.get_scale())
            if self._stepper.whole_gradients:
                self._stepper.unscale(optimizer, scale)
                scale = 1.0  # with a scale, even 1.0, the commit still looks for infinities
            self._request = Request(scale=scale)
        self._after_closure(model, optimizer)
        self._stepper.step(optimizer, self._request)
        return result

    def after_commit(self, commit: Commit) -> None:
        """Grow or shrink the loss scale as ``GradScaler.update`` does, by the infinities that all ranks have found."""
        scaler = self.enabled_scaler()
        scale = 1.0 if scaler is None or self._stepper.whole_gradients else float(scaler.get_scale())
        self.gradient = math.sqrt(commit.grad_norm_sq) / scale, commit.zeros
        if scaler is not None and (any(commit.used) or not commit.used):  # told before the commit: there are some
            update_scale(scaler, commit.non_finite > 0)

    def recall(self, norm: float | None, zeros: float | None) -> None:
        """Take ``gradient`` from a snapshot."""
        self.gradient = norm, zeros

    def clip_gradients(self, optimizer: Optimizer, clip_val: Any = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        """Clip gradients, also for fused optimizers under a loss scaler: here they do not unscale gradients."""
        Precision.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Scale this step's gradient to a global 2-norm of at most ``clip_val``, now or in the update."""
        if self._stepper.whole_gradients:
            self._stepper.clip(optimizer, float(clip_val))
        else:
            self._request = Request(self._request.scale, clip_norm=float(clip_val))

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clamp this step's averaged gradient to ``[-clip_val, clip_val]``, now or in the update."""
        if self._stepper.whole_gradients:
            for parameter in self.main_params(optimizer):  # torch's own function takes no mixture with DTensors
                if parameter.grad is not None:
                    local_of(parameter.grad).clamp_(-float(clip_val), float(clip_val))
        else:
            self._request = Request(self._request.scale, clip_value=float(clip_val))

    def enabled_scaler(self) -> torch.amp.GradScaler | None:
        """Return what scales the loss, or None."""
        scaler: torch.amp.GradScaler | None = getattr(self, "scaler", None)
        return scaler if scaler is not None and scaler.is_enabled() else None


def sharded(plugin: Precision) -> ShardedStep:
    """Give the plugin a class that combines its own class with `ShardedStep`. The plugin keeps its state."""
    if not isinstance(plugin, ShardedStep):
        cls = type(plugin)
        # Lightning stores the plugin's state in checkpoints under its class name, where other strategies look for it.
        names = {name: getattr(cls, name) for name in ("__doc__", "__module__", "__qualname__")}
        plugin.__class__ = type(cls.__name__, (ShardedStep, cls), names)
    return cast("ShardedStep", plugin)


def fit_to_device(plugin: ShardedStep, kind: str, accelerator: Accelerator | None) -> None:
    """Make a plugin that Lightning has made autocast and scale losses on the device that the accelerator trains on.

    Otherwise, Lightning's plugin for a third party's accelerator autocasts on CUDA, so it has no effect, and its scaler
    turns itself off where there is no CUDA.

    Args:
        plugin: Changed in place.
        kind: ``torch.device.type`` of the accelerator's tensors.
        accelerator: The accelerator that the trainer was given.

    Raises:
        ConfigurationError: If the user has given a plugin for another device.
    """
    own: Any = plugin
    device = getattr(own, "device", kind)
    if device == kind:
        return
    if not device_is_a_guess(type(plugin).__bases__[-1], device, accelerator):
        raise ConfigurationError(
            f"precision={own.precision!r} is for {device}, but the accelerator is {kind}."
            f" Give its plugin `device={kind!r}`, or name both: `Trainer(accelerator={kind!r},"
            f" precision={own.precision!r})`."
        )
    own.device = kind
    if own.scaler is not None and device_of_scaler(own.scaler) != kind:
        own.scaler = torch.amp.GradScaler(device=kind)
