"""The one file that ``fabric.save`` writes, and every other strategy reads."""

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from lightning_replica.checkpoint.archive import can_be_checked, check_archive, reading
from lightning_replica.checkpoint.location import Given, Location, locate
from lightning_replica.checkpoint.which_storage import storage_of
from lightning_replica.errors import CheckpointError


def write(path: Given, content: Mapping[str, Any]) -> None:
    """Write a checkpoint with ``torch.save``. A crash leaves either the former file or the new one.

    Raises:
        CheckpointError: If it cannot be written.
    """
    stream = io.BytesIO()
    torch.save(dict(content), stream)
    packed = stream.getvalue()
    storage_of(locate(path)).replace(packed)


@contextmanager
def checked(path: Given) -> Iterator[None]:
    """Check a file before the block reads it with ``torch.load``, which checks nothing.

    Raises:
        CheckpointError: If it is damaged, or a directory.
    """
    place: Location = locate(path)
    if storage_of(place).may_be_sharded():
        raise CheckpointError(
            f"{place} is a directory, and Fabric reads one file. `lightning-replica export {place} FILE.ckpt` makes one"
            " of a sharded checkpoint of `lightning.Trainer`."
        )
    if can_be_checked(place):
        check_archive(place)
    with reading(place):
        yield
