"""Which part of the model a rank has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from lightning_replica.checkpoint.boxes import Box, Whole
from lightning_replica.checkpoint.contents import in_part, of_part

T = TypeVar("T")


@dataclass(frozen=True)
class ModelPart:
    """The part of the model that a rank has; without model parallelism it is all of it.

    Attributes:
        name: What the names of its tensors begin with in a checkpoint; empty for the whole model.
        uncounted: Positions of parameters of which another part has a copy, which the norm of gradients counts.
        experts: Positions of the parameters of experts, which the rank's second grid shards.
        experts_name: What the names of experts' tensors begin with in a checkpoint.
        expert_modules: Names of the modules that have these parameters.
        counts_zeros: Whether each commit counts the zeros in the whole model's gradient.
        boxes: Where the module's tensors lie in those of the whole model, as far as known.
        objects: What the whole model has beside tensors, by megatron-core's names.
    """

    name: str = ""
    uncounted: frozenset[int] = frozenset()
    experts: frozenset[int] = frozenset()
    experts_name: str = ""
    expert_modules: frozenset[str] = frozenset()
    counts_zeros: bool = False
    boxes: Mapping[str, Sequence[Box]] = field(default_factory=dict)
    objects: Sequence[str] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """What the names of all tensors begin with in a checkpoint."""
        return (self.name, self.experts_name) if self.experts else (self.name,)

    def is_expert(self, name: str) -> bool:
        """Return whether the tensor ``name`` of the module is an expert's."""
        return name.rpartition(".")[0] in self.expert_modules

    def named(self, name: str) -> str:
        """Return the name in a checkpoint of the tensor ``name`` of the module."""
        return in_part(name, self.experts_name if self.is_expert(name) else self.name)

    def own(self, tensors: Mapping[str, T]) -> dict[str, T]:
        """Return this part's tensors of those of a checkpoint, by the module's names."""
        return {
            name.removeprefix(in_part("", part)): tensor
            for part in self.names
            for name, tensor in of_part(tensors, part).items()
        }

    def all_named(self, tensors: Mapping[str, T]) -> dict[str, T]:
        """Return ``tensors`` by their names in a checkpoint."""
        return {self.named(name): tensor for name, tensor in tensors.items()}

    def whole(self) -> Whole:
        """Return where this part's tensors lie in the whole model, by their names in a checkpoint."""
        return Whole(self.all_named(self.boxes), self.objects)
