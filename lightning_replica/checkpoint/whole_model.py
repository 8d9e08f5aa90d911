"""The tensors of the whole model in a checkpoint whose ranks had parts of it, put together one by one."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from lightning_replica.checkpoint.boxes import Box, Found, Stored
from lightning_replica.checkpoint.chunks import ChunkReader
from lightning_replica.checkpoint.contents import Contents, StateInfo, main_key, named_dtype, state_key, weight_key
from lightning_replica.checkpoint.resharding import Batch, strided
from lightning_replica.errors import CheckpointError


@dataclass(frozen=True)
class WholeTensor:
    """A tensor of the whole model, or of its optimizer's state.

    Attributes:
        shape: Its shape.
        dtype: The name of its dtype.
        found: Where its elements lie.
        key_of: Returns the name in the checkpoint of what belongs to a stored weight.
    """

    shape: tuple[int, ...]
    dtype: str
    found: Sequence[Found]
    key_of: Callable[[str], str]

    def read(self, contents: Contents, reader: ChunkReader) -> Tensor:
        """Return the tensor."""
        whole = torch.empty(self.shape, dtype=named_dtype(self.dtype))
        batch = Batch(contents, reader)
        for each in self.found:
            into = strided(whole.view(-1), each.local, each.block, 0)
            batch.block(self.key_of(each.name), each.stored, each.block, into)
        batch.read()
        return whole


class WholeModel:
    """What a checkpoint holds of the whole model.

    Args:
        contents: What the checkpoint holds.

    Raises:
        CheckpointError: If it does not say where its tensors lie in the whole model, or has not all of them.
    """

    def __init__(self, contents: Contents) -> None:
        if not contents.boxes:
            raise CheckpointError(
                "The checkpoint does not say where its tensors lie in those of the whole model: it was not written"
                " under `MegatronReplicaStrategy`, or by an earlier version. Resume from it, and save again."
            )
        self._contents = contents
        stored = Stored(contents.boxes)
        found = {key: _all_of(key, stored) for key in stored.keys}
        self._found = {key: each for key, each in found.items() if each}

    @property
    def left_out(self) -> list[str]:
        """The stored weights that are not known to be parts of the whole model."""
        return [name for name in self._contents.weights if name not in self._contents.boxes]

    def weights(self) -> dict[str, WholeTensor]:
        """Return the model's tensors by their names."""
        return {key: self._tensor(key, self._dtype(key), weight_key) for key in self._found}

    def main(self) -> dict[str, WholeTensor]:
        """Return the tensors that have 32 bits, by the same names: main parameters, or weights where these have 32."""
        found = {}
        for key in self._found:
            dtypes = {self._contents.main.get(name) for name in self._names(key)}
            if dtypes == {"float32"}:
                found[key] = self._tensor(key, "float32", main_key)
            elif self._dtype(key) == "float32":
                found[key] = self._tensor(key, "float32", weight_key)
        return found

    def state(self) -> dict[str, dict[str, WholeTensor]]:
        """Return the optimizers' state: for every entry that has the form of its parameter, tensors by their names."""
        found: dict[str, dict[str, WholeTensor]] = {}
        for number, key, infos in self._states():
            for entry, dtype in infos[0].like.items():
                if all(each.like.get(entry) == dtype for each in infos):
                    tensor = self._tensor(key, dtype, partial(state_key, number, key=entry))
                    found.setdefault(entry, {})[key] = tensor
        return found

    def steps(self) -> int | None:
        """Return how many steps the optimizers have made, by their state; None if that does not say."""
        steps = [int(each.plain["step"]) for _, _, infos in self._states() for each in infos if "step" in each.plain]
        return max(steps, default=None)

    def _states(self) -> Iterator[tuple[int, str, list[StateInfo]]]:
        for number, optimizer in enumerate(self._contents.optimizers):
            for key in self._found:
                names = self._names(key)
                if all(name in optimizer.state for name in names):
                    yield number, key, [optimizer.state[name] for name in names]

    def _tensor(self, key: str, dtype: str, key_of: Callable[[str], str]) -> WholeTensor:
        found = self._found[key]
        return WholeTensor(found[0].local.shape, dtype, found, key_of)

    def _names(self, key: str) -> list[str]:
        return list(dict.fromkeys(each.name for each in self._found[key]))

    def _dtype(self, key: str) -> str:
        return self._contents.weights[self._found[key][0].name].dtype


def box_of_all(key: str, shape: Sequence[int]) -> Box:
    """Return the box of a tensor that is a whole one of the model, with its elements in order."""
    strides = (*accumulate(reversed(shape[1:]), mul, initial=1),)[::-1] if shape else ()
    return Box(key, tuple(shape), (0,) * len(shape), tuple(shape), 0, strides)


def refuse_parts(contents: Contents, instead: str) -> None:
    """Refuse a checkpoint of a model that is divided among ranks.

    Args:
        contents: What the checkpoint holds.
        instead: What to do, for the message.

    Raises:
        CheckpointError: If it is.
    """
    if any(contents.parts):
        raise CheckpointError(
            f"The checkpoint holds a model in {len(contents.parts)} parts ({', '.join(contents.parts[:3])}...), which"
            f" no plain module can load. {instead}"
        )


def _all_of(key: str, stored: Stored) -> list[Found]:
    shape = stored.shape(key)
    found, missing = stored.find(box_of_all(key, shape or ()))
    if missing:
        raise CheckpointError(
            f"The checkpoint lacks {sum(each.numel for each in missing)} elements of {key!r}, a tensor of the whole"
            f" model of shape {list(shape or ())}. Use another checkpoint."
        )
    return found
