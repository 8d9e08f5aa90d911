"""Where a rank's tensors lie in the whole model: found out from `sharded_state_dict` of megatron-core's models."""

from bisect import bisect_right
from collections.abc import Mapping

from torch import Tensor, nn

from lightning_replica._compat import megatron
from lightning_replica._compat.megatron import WholeTensor
from lightning_replica.checkpoint.boxes import Box, Whole
from lightning_replica.core.messages import warn


def places_in(module: nn.Module) -> Whole:
    """Return where the tensors of ``module`` lie in the whole model, by the module's names.

    A tensor of which that is not known is left out: a checkpoint loads it into the same sizes only.
    """
    try:
        found, objects = megatron.whole_tensors(module)
        return Whole(_boxes(found, _tensors_of(module)), objects)
    except Exception as error:  # the user's modules may have any `sharded_state_dict`
        warn(
            f"`sharded_state_dict` of a module in {type(module).__name__} cannot be used: {type(error).__name__}:"
            f" {error}. Checkpoints of this model load into the same sizes only."
        )
        return Whole()


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the module's parameters and buffers without holes, each by the first of its names."""
    named: dict[str, Tensor] = dict(module.named_parameters())
    known = {id(parameter) for parameter in named.values()}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and id(tensor) not in known:
            known.add(id(tensor))
            named[name] = tensor
    return {name: tensor.detach() for name, tensor in named.items() if tensor.numel() and tensor.is_contiguous()}


def _boxes(found: list[WholeTensor], tensors: Mapping[str, Tensor]) -> dict[str, list[Box]]:
    """Return the boxes of all tensors whose every element is in ``found`` once."""
    begins = sorted((tensor.data_ptr(), name) for name, tensor in tensors.items())
    boxes: dict[str, list[Box]] = {}
    owners: dict[tuple[str, tuple[int, ...]], set[str]] = {}
    for part in found:
        name = _owner(part.data, begins, tensors)
        if name is None:
            continue
        boxes.setdefault(name, []).append(_box(part, tensors[name]))
        owners.setdefault((part.key, part.offset), set()).add(name)
    doubtful = {name for names in owners.values() if len(names) > 1 for name in names}
    return {
        name: each
        for name, each in boxes.items()
        if name not in doubtful and sum(box.block.numel for box in each) == tensors[name].numel()
    }


def _owner(data: Tensor, begins: list[tuple[int, str]], tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of the tensor in whose memory ``data`` lies; None if it is a copy."""
    place = bisect_right(begins, data.data_ptr(), key=lambda each: each[0]) - 1
    if place < 0:
        return None
    begin, name = begins[place]
    tensor = tensors[name]
    same = data.dtype == tensor.dtype and data.numel() > 0
    return name if same and data.data_ptr() < begin + tensor.numel() * tensor.itemsize else None


def _box(part: WholeTensor, tensor: Tensor) -> Box:
    ones = (1,) * part.prepended
    return Box(
        part.key,
        part.shape,
        part.offset,
        (*ones, *part.data.shape),
        (part.data.data_ptr() - tensor.data_ptr()) // tensor.itemsize,
        (*(0 for _ in ones), *part.data.stride()),
        part.padded,
    )
