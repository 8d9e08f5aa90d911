"""Tensor, pipeline and expert parallel models of megatron-core.

A world is coordinates (tensor and pipeline rank) times data parallelism (`sizes`). Schedules, layers and
`parallel_state` are megatron-core's own. Here is what stands between them and the trainer.

May import everything but the user's callbacks, `chaos` and the command line.
"""

from lightning_replica.megatron.grad_scaler import DynamicGradScaler

__all__ = ["DynamicGradScaler"]
