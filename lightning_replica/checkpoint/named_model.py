"""A rank's model as a checkpoint names it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lightning_replica.checkpoint.boxes import Whole


@dataclass(frozen=True)
class NamedModel:
    """A rank's model, or its part of it, by the names that tensors have in a checkpoint.

    Attributes:
        names: Name of every parameter, in registration order.
        extra_tensors: What the state dict has beside trained parameters, by name; the same on ranks with the same part.
        aliases: For every further name of a parameter or buffer (tied weights), its first.
        parts: Which parts of the model the rank has: what these names begin with; empty for the whole model.
        whole: Where they lie in the whole model, as far as known.
    """

    names: Sequence[str]
    extra_tensors: Mapping[str, Tensor]
    aliases: Mapping[str, str] = field(default_factory=dict)
    parts: Sequence[str] = ("",)
    whole: Whole = field(default_factory=Whole)
