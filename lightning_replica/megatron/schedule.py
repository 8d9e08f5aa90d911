"""The micro-batches of a step, under megatron-core's schedules."""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_replica._compat.torch import pytree
from lightning_replica.errors import ConfigurationError

ForwardStep: TypeAlias = Callable[[Iterator[Any], Any], tuple[Tensor, Callable[..., Any]]]
"""The user's function, with megatron-core's signature: ``(data_iterator, model)`` to ``(output, loss_func)``."""


def split(batch: Any, micro_batch_size: int | None, is_training: bool = True, stages: int = 1) -> list[Any]:
    """Cut every tensor of ``batch`` along its first dimension into micro-batches.

    Args:
        batch: Tensors in any nesting of tuples, lists and dicts, all of the same first size.
        micro_batch_size: Samples in each; None for one micro-batch.
        is_training: Whether the sizes must fit. Otherwise, micro-batches (as of the last batch of validation data) are
            smaller if necessary.
        stages: What their number must be a multiple of.

    Raises:
        ConfigurationError: If the batch has no tensor, if its size is not a multiple of ``micro_batch_size``, or if the
            number of micro-batches is not one of ``stages``.
    """
    leaves, structure = pytree.tree_flatten(batch)
    sizes = {len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
    if len(sizes) != 1:
        raise ConfigurationError(
            f"A batch is cut into micro-batches along the first dimension of its tensors, which is {sorted(sizes)}."
            " It must be the same for all of them."
        )
    size = sizes.pop()
    each = micro_batch_size or size
    if not is_training:
        fitting = (m for m in range(min(each, size), 0, -1) if size % m == 0 and size // m % stages == 0)
        each = next(fitting, each)
    if size % each:
        raise ConfigurationError(
            f"A batch of {size} samples is no multiple of {micro_batch_size=}. Use `drop_last=True`, or another size."
        )
    if size // each % stages:
        raise ConfigurationError(
            f"A batch of {size} samples makes {size // each} micro-batches, but interleaved stages need a multiple of"
            f" pipeline_model_parallel_size={stages}. Choose the batch size and micro_batch_size accordingly."
        )
    cut = [leaf.split(each) if isinstance(leaf, Tensor) and leaf.dim() else [leaf] * (size // each) for leaf in leaves]
    return [pytree.tree_unflatten(list(parts), structure) for parts in zip(*cut, strict=True)]


def size_of(micro_batch: Any) -> tuple[int, int]:
    """Return the number of samples, and of tokens in each, by the first tensor of a micro-batch that has both."""
    for leaf in pytree.tree_leaves(micro_batch):
        if isinstance(leaf, Tensor) and leaf.dim() > 1:
            return leaf.shape[0], leaf.shape[1]
    raise ConfigurationError("A micro-batch needs a tensor of shape (samples, tokens), such as the tokens.")


class Losses:
    """Notes the loss of every micro-batch on the last stage, as the user's loss function computes it.

    Args:
        forward_step: The user's function.
    """

    def __init__(self, forward_step: ForwardStep) -> None:
        self._forward_step = forward_step
        self.found: list[Tensor] = []

    def __call__(self, data_iterator: Iterator[Any], model: Any) -> tuple[Tensor, Callable[..., Any]]:
        """Run the user's function, and note what its loss function will return."""
        output, loss_func = self._forward_step(data_iterator, model)

        def noted(*args: Any, **options: Any) -> Any:
            result = loss_func(*args, **options)
            self.found.append(result[0].detach().clone())  # the schedule divides it by the number of micro-batches
            return result

        return output, noted

    def mean(self, device: torch.device) -> Tensor:
        """Return the mean over micro-batches, in float32, of shape (); 0 on other stages than the last."""
        return torch.stack(self.found).float().mean() if self.found else torch.zeros((), device=device)
