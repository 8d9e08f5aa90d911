"""Accelerators that Lightning does not have."""

from lightning_replica.accelerators.npu import NPUAccelerator

__all__ = ["NPUAccelerator"]
