"""Copies of the shard and of gradients, for what a step has to find again as it was.

Under manual optimization a batch may make several updates, but it can only be done again from its start. So the first
update of a batch window keeps a copy of the shard until the window is committed.

Gradients stay until the next step removes them. Under manual optimization a batch may add to them, and hooks anywhere
may look at them.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_replica.sharding.buffers import Buffers
from lightning_replica.sharding.optimizer import ShardedOptimizer
from lightning_replica.sharding.own_attributes import OwnAttributes, attributes_of_shard, set_attributes


class GradientCopy:
    """The gradients of some buffers at one point, to which they can return.

    Args:
        buffers: The buffers.
        fence: A context that is held while a copy is made.
        at_once: Whether to copy now. Otherwise `keep` does, and leaves out what user code has removed by then: when it
            returns to the point, it will remove that again.
    """

    def __init__(self, buffers: Sequence[Buffers], fence: AbstractContextManager[None], at_once: bool) -> None:
        self._fence = fence
        self._present = [(each, each.present()) for each in buffers]
        self._values: dict[int, Tensor] = {}
        self._is_complete = False
        if at_once:
            for each in buffers:
                each.attach_all()
            self.keep()

    def keep(self) -> None:
        """Copy, on the first call. Call before gradients change."""
        if self._is_complete:
            return
        with self._fence:
            for buffers, present in self._present:
                if any(was and now for was, now in zip(present, buffers.present(), strict=True)):
                    self._values[id(buffers)] = buffers.grads.clone()
        self._is_complete = True

    def of(self, buffers: Buffers) -> dict[nn.Parameter, Tensor]:
        """Return the gradients of some of the buffers by parameter, not as copies. Not all of them may be there yet."""
        present = next((present for each, present in self._present if each is buffers), [])
        if not self._is_complete:
            return present_in(buffers, [was and now for was, now in zip(present, buffers.present(), strict=True)])
        values = self._values.get(id(buffers))
        return {} if values is None else buffers.gradients_in(values, present)

    def is_of(self, buffers: Sequence[Buffers]) -> bool:
        """Return whether these are the buffers of which gradients were copied."""
        return [id(each) for each in buffers] == [id(each) for each, _ in self._present]

    def holds(self, buffers: Sequence[Buffers]) -> bool:
        """Return whether gradients are still what they were, to the bit."""
        if not (self.is_of(buffers) and self._is_complete):
            return False
        if any(each.present() != present for each, present in self._present):
            return False
        for each in buffers:
            each.attach_all()
        kept = ((each.grads, self._values.get(id(each))) for each in buffers)
        return all(value is None or torch.equal(_bits(now), _bits(value)) for now, value in kept)

    def restore(self) -> None:
        """Make gradients what they were."""
        for buffers, present in self._present:
            if id(buffers) in self._values:
                buffers.grads.copy_(self._values[id(buffers)])
            elif self._is_complete:
                buffers.grads.zero_()  # the commit also counts elements without gradient, which may hold anything now
            buffers.show(present)


def present_in(buffers: Buffers, present: Sequence[bool]) -> dict[nn.Parameter, Tensor]:
    """Return the gradients that ``present`` marks, as they are now, by parameter."""
    buffers.attach_all()
    return buffers.gradients_in(buffers.grads, present)


def _bits(values: Tensor) -> Tensor:
    """Return a view of the bytes: two NaN are equal then, and zeros of different signs are not."""
    return values.view(torch.uint8)


class Backup:
    """A copy of the shard that undoes a window.

    Args:
        optimizers: The optimizers, which the window has not changed yet.
        fence: A context that is held while a copy is made.

    Attributes:
        whole: Whether the copy of the shard is complete.
    """

    def __init__(self, optimizers: Sequence[ShardedOptimizer], fence: AbstractContextManager[None]) -> None:
        self._optimizers, self._fence = tuple(optimizers), fence
        self._values: list[list[Tensor]] = []
        self._states: list[tuple[dict[str, Tensor], dict[str, Any]]] = []
        self._attributes: list[OwnAttributes] = []
        self.whole = False

    @property
    def not_restored(self) -> list[str]:
        """The names of the optimizers' own attributes that `restore` leaves as they are."""
        numbered = enumerate(self._attributes)
        return [f"optimizer {number}.{name}" for number, each in numbered for name in each.left]

    def keep(self) -> None:
        """Copy, on the first call. Call before an update."""
        if self.whole:
            return
        with self._fence:
            self._values = [[buffers.main.clone() for buffers in optimizer.buffers] for optimizer in self._optimizers]
            for optimizer in self._optimizers:
                tensors, scalars = optimizer.state()
                self._states.append(({name: tensor.clone() for name, tensor in tensors.items()}, dict(scalars)))
                self._attributes.append(attributes_of_shard(optimizer.optimizer))
        self.whole = True

    def restore(self) -> None:
        """Restore the shard, if it was copied."""
        if not self.whole:
            return
        for optimizer, attributes in zip(self._optimizers, self._attributes, strict=True):
            set_attributes(optimizer.optimizer, *attributes)
        for optimizer, values, (tensors, scalars) in zip(self._optimizers, self._values, self._states, strict=True):
            for buffers, value in zip(optimizer.buffers, values, strict=True):
                buffers.main.copy_(value)
            optimizer.prepare_state({name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}, scalars)
            with torch.no_grad():
                for name, tensor in optimizer.state()[0].items():
                    tensor.copy_(tensors[name])
