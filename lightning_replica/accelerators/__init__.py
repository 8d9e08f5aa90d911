"""Accelerators that Lightning lacks. May import `devices` and `_compat`."""

from lightning_replica.accelerators.npu import NPUAccelerator

__all__ = ["NPUAccelerator"]
