"""A copy of the shard, for batches that make more than one update.

Under manual optimization a batch may make several updates, but it can only be done again from its start. So the first
update of a batch window keeps a copy of the shard until the window is committed.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from lightning_replica.sharding.optimizer import ShardedOptimizer
from lightning_replica.sharding.own_attributes import OwnAttributes, attributes_of, set_attributes


class Backup:
    """Copies that undo a window: the shard and the gradients that the window began with.

    Args:
        optimizers: The optimizers, which the window has not changed yet.
        fence: A context that is held while a copy is made.

    Attributes:
        whole: Whether the copy of the shard is complete.
    """

    def __init__(self, optimizers: Sequence[ShardedOptimizer], fence: AbstractContextManager[None]) -> None:
        self._optimizers, self._fence = tuple(optimizers), fence
        self._present = [(buffers, buffers.present()) for optimizer in optimizers for buffers in optimizer.buffers]
        self._grads: dict[int, Tensor] = {}
        self._gradients_are_kept = False
        self._values: list[list[Tensor]] = []
        self._states: list[tuple[dict[str, Tensor], dict[str, Any]]] = []
        self._attributes: list[OwnAttributes] = []
        self.whole = False

    @property
    def not_restored(self) -> list[str]:
        """The names of the optimizers' own attributes that `restore` leaves as they are."""
        numbered = enumerate(self._attributes)
        return [f"optimizer {number}.{name}" for number, each in numbered for name in each.left]

    def keep_gradients(self) -> None:
        """Copy the gradients that the window began with, on the first call. Call before gradients change."""
        if self._gradients_are_kept:
            return
        with self._fence:
            for buffers, present in self._present:
                if any(was and now for was, now in zip(present, buffers.present(), strict=True)):
                    self._grads[id(buffers)] = buffers.grads.clone()
        self._gradients_are_kept = True

    def keep_shard(self) -> None:
        """Copy the shard, on the first call. Call before an update."""
        if self.whole:
            return
        with self._fence:
            self._values = [[buffers.main.clone() for buffers in optimizer.buffers] for optimizer in self._optimizers]
            for optimizer in self._optimizers:
                tensors, scalars = optimizer.state()
                self._states.append(({name: tensor.clone() for name, tensor in tensors.items()}, dict(scalars)))
                self._attributes.append(attributes_of(optimizer.optimizer))
        self.whole = True

    def restore(self) -> None:
        """Restore everything. Gradients that the window zeroed first have no copy: the window will zero them again."""
        if self.whole:
            for optimizer, attributes in zip(self._optimizers, self._attributes, strict=True):
                set_attributes(optimizer.optimizer, *attributes)
            for optimizer, values, (tensors, scalars) in zip(self._optimizers, self._values, self._states, strict=True):
                for buffers, value in zip(optimizer.buffers, values, strict=True):
                    buffers.main.copy_(value)
                optimizer.prepare_state({name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}, scalars)
                with torch.no_grad():
                    for name, tensor in optimizer.state()[0].items():
                        tensor.copy_(tensors[name])
        for buffers, present in self._present:
            if id(buffers) in self._grads:
                buffers.grads.copy_(self._grads[id(buffers)])
            elif self._gradients_are_kept:
                buffers.grads.zero_()  # the commit also counts elements without gradient, which may hold anything now
            buffers.show(present)
