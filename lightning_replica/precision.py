"""Gradient clipping that knows shards."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch.plugins.precision import Precision
from torch.optim import Optimizer

from lightning_replica.sharding.state import Clip


class ReplicaPrecision(Precision):
    """32-bit precision whose clipping is part of the commit.

    The gradient norm is known only once all ranks have met, so clipping is recorded when Lightning asks for it and
    applied to the shard's gradient in the update. Hooks that run before see gradients that are not clipped and, as
    under any sharding, averaged only within the own shard.
    """

    def attach(self, step: Callable[[Clip], None]) -> None:
        """``step`` reduces, commits, updates and gathers; called after backward and its hooks."""
        self._step = step
        self._clip = Clip()

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Runs the closure and its hooks, then the sharded step in place of ``optimizer.step``."""
        self._clip = Clip()
        result = self._wrap_closure(model, optimizer, closure)
        self._step(self._clip)
        return result

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Has this step's gradient scaled to a global 2-norm of at most ``clip_val``."""
        self._clip = Clip(norm=float(clip_val))

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """Has this step's averaged gradient clamped to ``[-clip_val, clip_val]``."""
        self._clip = Clip(value=float(clip_val))
