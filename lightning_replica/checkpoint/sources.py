"""Where a rank's tensors lie in a checkpoint, where that divides the model otherwise. See [Note: boxes] in `boxes`.

A tensor without boxes is the same in all parts of the model (a module's buffer, a metric): any part's is read.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch

from lightning_replica.checkpoint.boxes import Block, Box, Found, Stored
from lightning_replica.checkpoint.contents import Contents, StateInfo, TensorInfo, in_part, named_dtype, refuse
from lightning_replica.errors import CheckpointError

Boxes = Mapping[str, Sequence[Box]]


def is_needed(contents: Contents, parts: Sequence[str], weights: Mapping[str, TensorInfo], boxes: Boxes) -> bool:
    """Return whether a checkpoint divides the model otherwise than this rank, as far as both know it.

    Args:
        contents: What the checkpoint holds.
        parts: What the names of this rank's parts of the model begin with.
        weights: The rank's tensors, by their names in a checkpoint.
        boxes: Where they lie in the whole model.
    """
    if not boxes or not contents.boxes:
        return False
    own = contents.of_parts(*parts)
    local = {name: list(each) for name, each in boxes.items()}
    return own.boxes != local or own.weights.keys() != weights.keys()


class Sources:
    """Where each of a rank's tensors lies in a checkpoint.

    Args:
        contents: What the checkpoint holds.
        parts: What the names of this rank's parts of the model begin with.
        weights: The rank's tensors, by their names in a checkpoint.
        boxes: Where they lie in the whole model.

    Raises:
        CheckpointError: If an element of a tensor is not in the checkpoint.
    """

    def __init__(
        self, contents: Contents, parts: Sequence[str], weights: Mapping[str, TensorInfo], boxes: Boxes
    ) -> None:
        self.contents, self.weights = contents, weights
        self._stored = Stored(contents.boxes)
        self._bare = {_bare(name, contents.parts): name for name in reversed(contents.weights)}
        self._parts = parts
        self._found: dict[str, list[Found]] = {}
        self._padding: dict[str, list[str]] = {}  # of what a tensor of this rank has padding
        problems = []
        for name, info in weights.items():
            problem = self._look(name, info, boxes[name]) if name in boxes else self._look_by_name(name, info)
            problems += [problem] if problem else []
        refuse("parameters or buffers", problems)

    def refuse_unread(self, keys: Iterable[str]) -> None:
        """Refuse a checkpoint that has tensors of the whole model which are not among ``keys``.

        Raises:
            CheckpointError: If it has.
        """
        unread = sorted({*self._stored.keys} - {*keys})
        refuse("parameters or buffers", [f"{key} is only in the checkpoint" for key in unread])

    def names(self, name: str) -> list[str]:
        """Return the stored tensors of which a tensor of this rank consists; of padding alone, one that it pads."""
        found = list(dict.fromkeys(each.name for each in self._found[name]))
        return found or [each for key in self._padding.get(name, ()) for each in self._stored.names(key)[:1]]

    def between(self, name: str, begin: int, end: int) -> list[Found]:
        """Return where the elements of a rank's tensor from ``begin`` up to ``end`` are, and maybe a few more."""
        found = []
        for each in self._found[name]:
            inside = each.local.within(begin, end)
            block = None if inside is None else each.block.meet(inside)
            if block is not None:
                found.append(Found(each.name, each.stored, each.local, block))
        return found

    def _look(self, name: str, info: TensorInfo, boxes: Sequence[Box]) -> str | None:
        self._found[name] = []
        for local in boxes:
            shape = self._stored.shape(local.key)
            if shape is None:
                return f"{name} ({local.key} of the whole model) is not in the checkpoint"
            if shape != local.shape and not (local.padded and len(shape) == len(local.shape)):
                forms = f"{list(shape)} in the checkpoint and {list(local.shape)} here"
                return f"{name} is a part of {local.key}, which is {forms}"
            found, missing = self._stored.find(local)
            holes = [hole for block in missing if (hole := block.meet(Block.all_of(shape))) is not None]
            if holes:
                return f"{name} lacks {sum(each.numel for each in holes)} elements of {local.key} in the checkpoint"
            self._found[name] += found
            if missing:
                self._padding[name] = [local.key]
        return _narrower(name, info, [self.contents.weights[each] for each in self.names(name)])

    def _look_by_name(self, name: str, info: TensorInfo) -> str | None:
        bare = _bare(name, self._parts)
        stored = name if name in self.contents.weights else self._bare.get(bare)
        if stored is None or stored in self.contents.boxes:
            return f"{name} ({info}) is not in the checkpoint, or its place in the whole model is not known here"
        saved = self.contents.weights[stored]
        if str(saved) != str(info):
            return f"{name} is {saved} in the checkpoint and {info} here"
        local, whole = (
            Box(bare, each.shape, (0,) * len(each.shape), each.shape, 0, each.stride) for each in (info, saved)
        )
        self._found[name] = [Found(stored, whole, local, local.block)] if info.numel else []
        return None

    def state(self, number: int, name: str) -> StateInfo | None:
        """Return what the checkpoint has of an optimizer's state for a tensor of this rank; None if it has none.

        Raises:
            CheckpointError: If the parts of the tensor have different state, or state that has another form than the
                tensor and is of several parts.
        """
        stored, states = self.names(name), self._states(number)
        infos = [states[each] for each in stored if each in states]
        if not infos:
            return None
        first = infos[0]
        if len(infos) < len(stored) or any(each.like != first.like for each in infos):
            raise CheckpointError(
                f"The state of {name} cannot be put together: the checkpoint has it in {len(stored)} parts"
                f" ({', '.join(stored[:3])}), which have different state in optimizer {number}. Load it with the sizes"
                " that wrote it."
            )
        if first.whole and (len(stored) > 1 or str(self.contents.weights[stored[0]]) != str(self.weights[name])):
            raise CheckpointError(
                f"The state of {name} cannot be divided otherwise: {min(first.whole)!r} of optimizer {number} does not"
                " have the parameter's form. Load the checkpoint with the sizes that wrote it."
            )
        return first

    def number(self, number: int) -> int:
        """Return which of the checkpoint's optimizers has the state of one of this rank's."""
        return 0 if self.is_imported else number

    @property
    def is_imported(self) -> bool:
        """Whether the checkpoint knows of no param groups."""
        return not any(each.groups for each in self.contents.optimizers)

    def check_groups(self, groups: Sequence[Sequence[Sequence[str]]]) -> None:
        """Refuse a checkpoint whose param groups have other parameters.

        Args:
            groups: The names of the parameters of each param group of each optimizer.

        Raises:
            CheckpointError: If they have.
        """
        if self.is_imported:
            return
        saved_groups = [[group["params"] for group in each.groups] for each in self.contents.optimizers]
        counts = [len(each) for each in saved_groups], [len(each) for each in groups]
        if counts[0] != counts[1]:
            refuse("param groups", [f"the optimizers have {counts[0]} in the checkpoint and {counts[1]} here"])
        problems = []
        for number, (saved, local) in enumerate(zip(saved_groups, groups, strict=True)):
            for place, (names, own) in enumerate(zip(saved, local, strict=True)):
                known = {*names}
                problems += [
                    f"group {place} of optimizer {number} differs in {name}"
                    for name in own
                    if not known.issuperset(self.names(name))
                ]
        refuse("param groups", problems)

    def _states(self, number: int) -> Mapping[str, StateInfo]:
        optimizers = self.contents.optimizers
        return optimizers[self.number(number)].state if optimizers else {}


def _bare(name: str, parts: Sequence[str]) -> str:
    """Return the name of a tensor without that of its part of the model."""
    for part in parts:
        if name.startswith(in_part("", part)):
            return name.removeprefix(in_part("", part))
    return name


def _narrower(name: str, local: TensorInfo, saved: Sequence[TensorInfo]) -> str | None:
    """Return what is wrong if a tensor cannot hold every value of those that it consists of."""
    for info in saved:
        dtypes = named_dtype(info.dtype), named_dtype(local.dtype)
        if torch.promote_types(*dtypes) != dtypes[1]:
            return f"{name} is {info.dtype} in the checkpoint and {local.dtype} here"
    return None
