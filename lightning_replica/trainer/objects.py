"""Lightning's own collectives (`strategy.reduce`, `all_gather`, `broadcast`), waited for in slices.

Lightning's helpers block in C++ until the operation ends. If gloo loses the wake-up, a rank that waits there does not
notice that the next generation has begun (see [Note: destructors may block] in core/pending_work.py).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_replica.core import plain
from lightning_replica.core.pending_work import Work
from lightning_replica.errors import ConfigurationError

Wait = Callable[[Work, Tensor], None]
_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


def reduce(tensor: Tensor, group: Any, reduce_op: Any, wait: Wait) -> Tensor:
    """Reduce a tensor over ``group`` as ``DDPStrategy.reduce`` does: in place where the operation allows it.

    Args:
        tensor: Any shape. An integer tensor is averaged in float32.
        group: Process group; None is the world.
        reduce_op: A ``ReduceOp``, or "sum", "mean", "avg", "min", "max", "product"; None is "sum".
        wait: Waits for the collective on a tensor.
    """
    name = "sum" if reduce_op is None else reduce_op.lower() if isinstance(reduce_op, str) else None
    if name is not None and name not in _OPS:
        raise ConfigurationError(f"{reduce_op=} is not known. Use one of {', '.join(_OPS)}.")
    if name in ("mean", "avg") and not torch.is_floating_point(tensor):
        tensor = tensor.to(torch.float32)
    op = reduce_op if name is None else _OPS[name]
    wait(dist.all_reduce(tensor, op=op, group=group, async_op=True), tensor)
    return tensor / dist.get_world_size(group) if name in ("mean", "avg") else tensor


def all_gather(tensor: Tensor, group: Any, wait: Wait) -> Tensor:
    """Return the stacked tensors of all ranks of ``group``, in shape (ranks, ...), without gradients."""
    tensor = tensor.detach().contiguous()
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    wait(dist.all_gather(gathered, tensor, group=group, async_op=True), tensor)
    return torch.stack(gathered)


def broadcast(obj: Any, src: int, wait: Wait) -> Any:
    """Return the object of rank ``src`` on every rank.

    Unlike ``broadcast_object_list`` it does not unpickle the received bytes: that would run any code they contain.

    Raises:
        ConfigurationError: On every rank, if the object holds more than plain data, tensors, arrays and paths.
    """
    mine = dist.get_rank() == src
    data, refused = b"", ""
    if mine:
        try:
            data = plain.save(obj)
        except plain.NotPlainError as error:
            refused = str(error)
            data = refused.encode()
    head = torch.tensor([len(data), bool(refused)])
    wait(dist.broadcast(head, src, async_op=True), head)
    content = torch.zeros(int(head[0]), dtype=torch.uint8)
    if mine and len(content) == len(data):
        content.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    wait(dist.broadcast(content, src, async_op=True), content)
    received = content.numpy().tobytes()
    if head[1]:
        raise ConfigurationError(
            f"The object that rank {src} broadcasts cannot be sent: {received.decode()}. Ranks do not unpickle what"
            " they receive. Send plain data, tensors or paths, or allow the type on every rank with"
            " `torch.serialization.add_safe_globals([...])`."
        )
    # On a replacement the journal returns what the predecessor sent, which may differ from the replacement's object.
    return obj if mine and received == data else plain.load(received)
