"""Which part of the model a rank has."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from lightning_replica.checkpoint.contents import in_part, of_part

T = TypeVar("T")


@dataclass(frozen=True)
class ModelPart:
    """The part of the model that the ranks of one grid have; without model parallelism it is all of it.

    Attributes:
        name: What the names of its tensors begin with in a checkpoint; empty for the whole model.
        uncounted: Positions of parameters of which another part has a copy, which the norm of gradients counts.
    """

    name: str = ""
    uncounted: frozenset[int] = frozenset()

    def named(self, name: str) -> str:
        """Return the name in a checkpoint of the tensor ``name`` of the module."""
        return in_part(name, self.name)

    def own(self, tensors: Mapping[str, T]) -> dict[str, T]:
        """Return this part's tensors of those of a checkpoint, by the module's names."""
        prefix = self.named("")
        return {name.removeprefix(prefix): tensor for name, tensor in of_part(tensors, self.name).items()}

    def all_named(self, tensors: Mapping[str, T]) -> dict[str, T]:
        """Return ``tensors`` by their names in a checkpoint."""
        return {self.named(name): tensor for name, tensor in tensors.items()}
