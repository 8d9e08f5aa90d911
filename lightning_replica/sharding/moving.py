"""How a shard is sent to another rank: a description in plain data, then a few large flat tensors.

The order of the tensors follows from the description: the values of each flat buffer, each kind of optimizer state
of each optimizer, and the gradients, where a batch may begin with some. Large tensors are sent from where they lie and
received in place; small ones are sent together, as one flat tensor per kind.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_replica.sharding.optimizer import ShardedOptimizer
from lightning_replica.sharding.own_attributes import attributes_of_shard, set_attributes

_LARGE_BYTES = 2**20


def export_shard(
    optimizers: Sequence[ShardedOptimizer[Any]], with_gradients: bool
) -> tuple[dict[str, Any], list[Tensor]]:
    """Describe and list the shard.

    Returns:
        Plain data, and flat tensors: for each optimizer, the values of each buffer, its state, and gradients, if asked.
    """
    manifest: dict[str, Any] = {"layouts": [], "tensors": [], "scalars": [], "gradients": []}
    manifest["attributes"] = [list(attributes_of_shard(optimizer.optimizer)) for optimizer in optimizers]
    flat: list[Tensor] = []
    for optimizer in optimizers:
        tensors, scalars = optimizer.state()
        manifest["layouts"].append([list(buffers.order) for buffers in optimizer.buffers])
        manifest["scalars"].append(scalars)
        manifest["tensors"].append(
            {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()}
        )
        flat += [buffers.main for buffers in optimizer.buffers]
        flat += [_joined(together) for together in _messages(tensors)]
        for buffers in optimizer.buffers:
            present = buffers.present() if with_gradients else []
            manifest["gradients"].append(present)
            if any(present):
                flat.append(buffers.grads)
    return manifest, flat


def import_shard(
    optimizers: Sequence[ShardedOptimizer[Any]], manifest: dict[str, Any], receive: Callable[[Tensor], None]
) -> None:
    """Fill the shard with what ``receive`` brings; buffers must already be laid out as ``manifest`` says."""
    for optimizer, attributes in zip(optimizers, manifest["attributes"], strict=True):
        set_attributes(optimizer.optimizer, *attributes)
    gradients = iter(manifest["gradients"])
    for optimizer, described, scalars in zip(optimizers, manifest["tensors"], manifest["scalars"], strict=True):
        shapes = {name: (getattr(torch, dtype), tuple(shape)) for name, (dtype, shape) in described.items()}
        optimizer.prepare_state(shapes, scalars)
        for buffers in optimizer.buffers:
            receive(buffers.main)
        for together in _messages(optimizer.state()[0]):
            flat = _joined(together)
            receive(flat)
            if len(together) > 1:
                for tensor, part in zip(together, flat.split([t.numel() for t in together]), strict=True):
                    tensor.copy_(part.view(tensor.shape))
        for buffers in optimizer.buffers:
            present = next(gradients)
            if any(present):
                receive(buffers.grads)
                buffers.show(present)


def _messages(tensors: dict[str, Tensor]) -> list[list[Tensor]]:
    """Group ``{"<piece>/<key>": tensor}``: a large one by itself, all others by key and dtype."""
    together: dict[tuple[Any, ...], list[Tensor]] = {}
    for name, tensor in tensors.items():
        alone = tensor.nbytes >= _LARGE_BYTES
        together.setdefault((name,) if alone else (name.split("/", 1)[1], tensor.dtype), []).append(tensor)
    return list(together.values())


def _joined(tensors: list[Tensor]) -> Tensor:
    """Join all tensors into one flat tensor; a single contiguous one stays in its own memory."""
    return tensors[0].reshape(-1) if len(tensors) == 1 else torch.cat([tensor.reshape(-1) for tensor in tensors])
