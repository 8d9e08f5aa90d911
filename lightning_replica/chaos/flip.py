"""The fault "corrupt": flips a bit in a shard."""

from collections.abc import Sequence

import torch
from torch import Tensor


def flip_bit(shard: Sequence[tuple[str, Tensor]], seed: int) -> str:
    """Flip one bit somewhere in a shard, unnoticed by torch, as a cosmic ray would.

    Args:
        shard: The shard as `Engine.shard` returns it; not empty.
        seed: Determines which bit.

    Returns:
        A description of the flipped bit.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = [(name, tensor) for name, tensor in shard if tensor.numel()]
    name, tensor = tensors[int(torch.randint(len(tensors), (), generator=generator))]
    index = int(torch.randint(tensor.numel(), (), generator=generator))
    bit = int(torch.randint(8 * tensor.element_size(), (), generator=generator))
    element = tensor.data.as_strided((1,), (1,), _offset(tensor, index))
    element.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    return f"bit {bit} of element {index} of {name}"


def _offset(tensor: Tensor, index: int) -> int:
    """Return the position in the storage of element ``index`` in logical order."""
    offset = int(tensor.storage_offset())
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        index, place = divmod(index, size)
        offset += place * stride
    return offset
