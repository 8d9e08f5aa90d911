"""What a sharded checkpoint holds beside its tensors, as plain data: shapes, hyperparameters, single numbers."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_replica.checkpoint import verification
from lightning_replica.checkpoint.boxes import Box
from lightning_replica.checkpoint.storage import Readable, damaged
from lightning_replica.core import plain
from lightning_replica.devices.host import HOST
from lightning_replica.errors import CheckpointError

T = TypeVar("T")

CONTENTS = "contents.pt"
PLAIN = "plain.pt"
WEIGHTS_AT = "weights_at"  # in plain data: the key of a checkpoint under which its weights belong, if not "state_dict"
_NAMED_AT_MOST = 3


@dataclass(frozen=True)
class TensorInfo:
    """The form of a tensor whose elements were written in the order in which they lie in memory.

    Attributes:
        dtype: The name of the dtype, such as "float32".
        shape: The shape, as in torch.
        stride: The stride, as in torch. Elements leave no holes.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse strides with which elements would overlap or leave holes.

        Raises:
            ValueError: If they would, or if there is no tensor of this shape and stride.
        """
        if not all(type(each) is int and each >= 0 for each in (*self.shape, *self.stride)):
            raise ValueError(f"a tensor cannot have shape {self.shape} and stride {self.stride}")
        numel = 1
        for stride, length in sorted(zip(self.stride, self.shape, strict=True)):
            if length != 1 and stride != numel and 0 not in self.shape:
                raise ValueError(f"a tensor of shape {self.shape} and stride {self.stride} overlaps or has holes")
            numel *= length

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorInfo":
        """Describe a tensor whose elements leave no holes."""
        return cls(dtype_name(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()))

    @property
    def numel(self) -> int:
        """The number of elements."""
        return torch.Size(self.shape).numel()

    def empty(self) -> Tensor:
        """Return an uninitialised flat tensor of shape (numel,)."""
        return torch.empty(self.numel, dtype=named_dtype(self.dtype))

    def view(self, flat: Tensor) -> Tensor:
        """Return a view of the flat elements in the original shape."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset())

    def same_order(self, tensor: Tensor) -> bool:
        """Return whether the elements of ``tensor``, which must have this shape, lie in memory in the same order."""
        return all(
            a == b for a, b, size in zip(self.stride, tensor.stride(), self.shape, strict=True) if size != 1
        )  # fmt: skip

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class StateInfo:
    """The optimizer state of one parameter.

    Attributes:
        like: For every entry that has one element for every element of the parameter, its dtype.
        whole: Every other tensor with one dimension or more.
        plain: Everything else, unchanged.
    """

    like: dict[str, str] = field(default_factory=dict)
    whole: dict[str, TensorInfo] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OptimizerInfo:
    """One optimizer.

    Attributes:
        name: The name of its class.
        groups: Its param groups, with names in place of parameters.
        state: The state by parameter. A parameter that was never updated has no entry.
    """

    name: str
    groups: list[dict[str, Any]]
    state: dict[str, StateInfo]


@dataclass(frozen=True)
class Contents:
    """Everything that a reader needs in order to read the tensors.

    Attributes:
        weights: Every parameter and buffer, by the first of its names.
        aliases: For every further name of a parameter or buffer, its first.
        main: Dtype of the main parameter, for every parameter that has one.
        optimizers: The optimizers, in order. Of an imported checkpoint, none if it had no state; otherwise one without
            param groups, whose state is for whichever optimizer has the parameter.
        boxes: Where the weights of a model that is divided among ranks lie in the whole model, as far as known.
        objects: What the whole model has beside tensors in megatron-core's checkpoints. None of them holds anything.
        parts: What the names of each part of the model begin with; empty for the whole model.
    """

    weights: dict[str, TensorInfo]
    aliases: dict[str, str]
    main: dict[str, str]
    optimizers: list[OptimizerInfo]
    boxes: dict[str, list[Box]] = field(default_factory=dict)
    objects: list[str] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)

    def as_plain(self) -> dict[str, Any]:
        """Return the contents for ``torch.save``, loadable with ``weights_only=True``."""
        return asdict(self)

    @classmethod
    def of_plain(cls, read: Mapping[str, Any]) -> "Contents":
        """Build contents from what `as_plain` returned."""
        return cls(
            {name: TensorInfo(**info) for name, info in read["weights"].items()},
            read["aliases"],
            read["main"],
            [
                OptimizerInfo(each["name"], each["groups"], {k: _state_of(v) for k, v in each["state"].items()})
                for each in read["optimizers"]
            ],
            {name: [Box(**box) for box in each] for name, each in read.get("boxes", {}).items()},
            read.get("objects", []),
            read.get("parts", []),
        )

    def of_parts(self, *parts: str) -> "Contents":
        """Return only what belongs to these parts of the model, by `of_part`."""

        def only(entries: Mapping[str, T]) -> dict[str, T]:
            return {name: value for part in parts for name, value in of_part(entries, part).items()}

        optimizers = [
            OptimizerInfo(
                each.name,
                [{**group, "params": [*only(dict.fromkeys(group["params"]))]} for group in each.groups],
                only(each.state),
            )
            for each in self.optimizers
        ]
        return Contents(
            only(self.weights),
            only(self.aliases),
            only(self.main),
            optimizers,
            only(self.boxes),
            self.objects,
            list(parts),
        )

    def tensors(self) -> dict[str, tuple[int, str]]:
        """Return number of elements and dtype of every tensor of the checkpoint, by its name in the checkpoint."""
        found = {weight_key(name): (info.numel, info.dtype) for name, info in self.weights.items()}
        found |= {main_key(name): (self.weights[name].numel, dtype) for name, dtype in self.main.items()}
        for number, optimizer in enumerate(self.optimizers):
            for name, state in optimizer.state.items():
                for key, dtype in state.like.items():
                    found[state_key(number, name, key)] = (self.weights[name].numel, dtype)
                for key, info in state.whole.items():
                    found[state_key(number, name, key)] = (info.numel, info.dtype)
        return found


def in_part(name: str, part: str) -> str:
    """Return the name in a checkpoint of what is called ``name`` in a part of the model; empty for the whole model."""
    return f"{part}.{name}" if part else name


def of_part(entries: Mapping[str, T], part: str) -> dict[str, T]:
    """Return the entries whose names `in_part` has made for ``part``; all of them for an empty one."""
    return {name: value for name, value in entries.items() if name.startswith(in_part("", part))}


def merged(parts: Sequence[Contents]) -> Contents:
    """Merge the contents of the parts of a model, whose names differ.

    Raises:
        CheckpointError: If the parts do not have the same optimizers and param groups.
    """
    if len({tuple((each.name, len(each.groups)) for each in part.optimizers) for part in parts}) > 1:
        raise CheckpointError(
            "The ranks of different pipeline stages or tensor ranks have different optimizers, or another number of"
            " param groups. Make the same ones in `configure_optimizers` on all ranks; a group may be empty."
        )
    objects = sorted({each for part in parts for each in part.objects})
    whole = Contents({}, {}, {}, [], {}, objects, [name for part in parts for name in part.parts])
    for part in parts:
        whole.weights.update(part.weights)
        whole.aliases.update(part.aliases)
        whole.main.update(part.main)
        whole.boxes.update(part.boxes)
    for same in zip(*(part.optimizers for part in parts), strict=True):
        groups = [
            {**alike[0], "params": [name for group in alike for name in group["params"]]}
            for alike in zip(*(each.groups for each in same), strict=True)
        ]
        state = {name: info for each in same for name, info in each.state.items()}
        whole.optimizers.append(OptimizerInfo(same[0].name, groups, state))
    return whole


def as_bytes(content: Mapping[str, Any], what: str) -> bytes:
    """Check that ``content`` can be read again, and return it as ``torch.save`` writes it."""
    content = dict(content)
    if not is_plain(content):
        raise CheckpointError(
            f"A checkpoint holds only tensors and plain data, but in {what}, {unsavable(content, 'checkpoint')}."
            " Save numbers, strings, lists, dicts and tensors instead."
        )
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def is_plain(content: Any) -> bool:
    """Return whether `read_plain` could read it, which runs no code."""
    buffer = io.BytesIO()
    try:
        torch.save(content, buffer)
        buffer.seek(0)
        with plain.safe_types():
            torch.load(buffer, weights_only=True, map_location="meta")
    except Exception:
        return False
    return True


def unsavable(content: Any, where: str) -> str:
    """Name the innermost value that is not plain, and its type."""
    inner = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in inner:
        if not is_plain(value):
            return unsavable(value, f"{where}[{key!r}]")
    return f"{where} is a {type(content).__module__}.{type(content).__qualname__}"


def read_plain(directory: Readable, name: str) -> dict[str, Any]:
    """Return the tensors and plain data that ``torch.save`` wrote to the file ``name`` of a published directory.

    Raises:
        CheckpointError: If the file is damaged, or does not hold a dict of tensors and plain data.
    """
    content = io.BytesIO(verification.read_file(directory, name))
    try:
        with plain.safe_types():
            read = torch.load(content, weights_only=True, map_location=HOST)
    except Exception as error:  # torch promises no error type
        said = str(error).partition("\n")[0]
        raise damaged(directory, f"{name} cannot be loaded ({type(error).__name__}: {said})") from error
    if not isinstance(read, dict):
        raise damaged(directory, f"{name} holds a {type(read).__name__}, not a dict")
    return read


def read_contents(directory: Readable) -> Contents:
    """Return the contents of a published directory.

    Raises:
        CheckpointError: If the contents file is damaged, or holds impossible values.
    """
    read = read_plain(directory, CONTENTS)
    try:
        return Contents.of_plain(read)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise damaged(directory, f"{CONTENTS} holds impossible values ({type(error).__name__}: {error})") from error


def weight_key(name: str) -> str:
    """Return the name of a parameter or buffer in the checkpoint."""
    return f"model.{name}"


def main_key(name: str) -> str:
    """Return the name of a main parameter in the checkpoint."""
    return f"main.{name}"


def state_key(optimizer: int, name: str, key: str) -> str:
    """Return the name of an entry of an optimizer's state in the checkpoint."""
    return f"optimizer.{optimizer}.{key}.{name}"


def check_model(saved: Contents, weights: Mapping[str, TensorInfo], groups: Sequence[Sequence[Sequence[str]]]) -> None:
    """Refuse a checkpoint of another model.

    Args:
        saved: The contents of the checkpoint.
        weights: The weights of the module.
        groups: The names of the parameters of each param group of each optimizer.

    Raises:
        CheckpointError: If anything differs. The message names up to three differences.
    """
    refuse("parameters or buffers", _weight_differences(saved.weights, weights))
    if len(saved.optimizers) != len(groups):
        raise CheckpointError(
            f"The checkpoint is of another model: it has {len(saved.optimizers)} optimizers, and this one"
            f" has {len(groups)}. Load it into the model that wrote it."
        )
    refuse(
        "param groups",
        [
            text
            for number, (info, local) in enumerate(zip(saved.optimizers, groups, strict=True))
            for text in _group_differences(number, info, local)
        ],
    )


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def named_dtype(name: str) -> torch.dtype:
    """Return the dtype of a name that `dtype_name` returned.

    Raises:
        CheckpointError: If this torch has no such dtype.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"The checkpoint holds tensors of dtype {name!r}, which this torch does not have.")
    return found


def _weight_differences(saved: Mapping[str, TensorInfo], local: Mapping[str, TensorInfo]) -> list[str]:
    found = []
    for name in [*local, *(name for name in saved if name not in local)]:
        if name not in saved:
            found.append(f"{name} ({local[name]}) is not in the checkpoint")
        elif name not in local:
            found.append(f"{name} ({saved[name]}) is only in the checkpoint")
        elif str(saved[name]) != str(local[name]):
            found.append(f"{name} is {saved[name]} in the checkpoint and {local[name]} here")
    return found


def _group_differences(number: int, saved: OptimizerInfo, local: Sequence[Sequence[str]]) -> list[str]:
    if len(saved.groups) != len(local):
        return [f"optimizer {number} ({saved.name}) has {len(saved.groups)} in the checkpoint and {len(local)} here"]
    found = []
    for place, (group, names) in enumerate(zip(saved.groups, local, strict=True)):
        moved = set(group["params"]) ^ set(names)
        if moved:
            found.append(f"group {place} of optimizer {number} ({saved.name}) differs in {min(moved)}")
    return found


def refuse(what: str, differences: Sequence[str]) -> None:
    """Raise an error that names up to three of the ``differences`` of two models, if there are any.

    Raises:
        CheckpointError: If there are.
    """
    if differences:
        more = f"; and {len(differences) - _NAMED_AT_MOST} more" if len(differences) > _NAMED_AT_MOST else ""
        raise CheckpointError(
            f"The checkpoint is of another model: {len(differences)} {what} differ:"
            f" {'; '.join(differences[:_NAMED_AT_MOST])}{more}. Load it into the model that wrote it."
        )


def _state_of(read: Mapping[str, Any]) -> StateInfo:
    return StateInfo(read["like"], {k: TensorInfo(**info) for k, info in read["whole"].items()}, read["plain"])
