"""What the types of torch, of Lightning and of this package leave open, where a test knows more."""

from pathlib import Path

from torch import Tensor
from torch import distributed as dist

from lightning_replica.checkpoint.location import Location, Url


def on_disk(location: Location | None) -> Path:
    """A location that is a path."""
    assert isinstance(location, Path)
    return location


def in_store(location: Location | None) -> Url:
    """A location that is a URL."""
    assert isinstance(location, Url)
    return location


def world_group() -> dist.ProcessGroup:
    """The group of all ranks."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def tensor_of(value: object) -> Tensor:
    """A tensor of which the types say that it might be something else."""
    assert isinstance(value, Tensor)
    return value


def grad_of(parameter: Tensor) -> Tensor:
    """A gradient that is there."""
    assert parameter.grad is not None
    return parameter.grad
