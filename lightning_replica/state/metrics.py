"""Metrics under way: what `self.log` and torchmetrics have accumulated in this epoch on this rank.

Metrics like AUROC keep all predictions of an epoch in lists. Of these, only what is new is copied and packed. Code of
torchmetrics raises a tensor's version when it writes to the tensor. Other code may write through ``.data``; so the
content of some tensors is compared in each snapshot, in turn, and what is found late is reported.
"""

import operator
from collections import Counter
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from torchmetrics import Metric

from lightning_replica._compat.lightning_names import _Metadata, _ResultCollection, _ResultMetric, _Sync, pl
from lightning_replica._compat.torch import data_version, registered_groups
from lightning_replica._compat.tree import Tree
from lightning_replica.core import plain
from lightning_replica.core.inexact import Report, warn
from lightning_replica.groups.handles import Handle
from lightning_replica.state.objects.contents import fill, late, plain_of, same_content, with_class_of

_TENSORS = ("value", "cumulated_batch_size", "_forward_cache", "_computed")
_TENSORS_OF_OBJECTS = ("_forward_cache", "_computed")
_META = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")
_META_OPTIONAL = ("dataloader_idx", "metric_attribute")
_PART_ITEMS: Final = 32  # of a long list, which are packed together
_LONG: Final = 2 * _PART_ITEMS
_IN_TURN: Final = 8  # tensors of a long list whose content is compared in one snapshot
_REDUCTIONS: dict[str, Any] = {"mean": torch.mean, "sum": torch.sum, "min": torch.min, "max": torch.max}


def export_results(results: _ResultCollection) -> list[dict[str, Any]]:
    """Return every result as plain data; torchmetrics objects by name, because their state is in the module."""
    return [_export(key, metric) for key, metric in results.items() if metric.is_tensor or metric.meta.metric_attribute]


def import_results(
    results: _ResultCollection, plain: list[dict[str, Any]], sync: Callable[..., Any], module: pl.LightningModule
) -> None:
    """Restore in ``results`` what `export_results` returned; ``sync`` reduces over ranks where a result asks for it."""
    known = {entry["key"] for entry in plain}
    for key in [key for key, metric in results.items() if metric.is_tensor and key not in known]:
        del results[key]
    for entry in plain:
        if entry["key"] not in results:
            results[entry["key"]] = _new(entry, sync, module)
        _import(results[entry["key"]], entry, module.device)
    results.batch = results.batch_size = None


class CopiedList(list[Any]):
    """Copies of what a list held, which nobody changes.

    Attributes:
        parts: The first items, packed; those after them have not been packed yet. A longer list that begins with the
            same items may have the same object, to which both only append.
    """

    def __init__(self, items: Iterable[Any], parts: list[bytes]) -> None:
        super().__init__(items)
        self.parts = parts

    def pack(self) -> list[bytes]:
        """Return the items, packed in parts. Most are the same objects as those of the list it was copied from.

        Raises:
            NotPlainError: If an item cannot be packed.
        """
        whole = len(self) // _PART_ITEMS
        for place in range(len(self.parts), whole):
            self.parts.append(plain.pack(self[place * _PART_ITEMS : (place + 1) * _PART_ITEMS]))
        return [*self.parts[:whole], plain.pack(self[whole * _PART_ITEMS :])]


class MetricStates:
    """Copies the states of all torchmetrics objects of a module, and of lists what is new since the last time.

    Args:
        report: Called with what was written to in a way that was seen late.
    """

    def __init__(self, report: Report = warn) -> None:
        self._report, self._turn = report, 0
        self._known: dict[tuple[int, str], tuple[list[Any], list[int], CopiedList]] = {}

    def copy(self, tree: Tree) -> list[dict[str, Any]]:
        """Return copies of the states."""
        names = ("_update_count", "_computed")
        self._turn += 1
        return [
            {name: self._copy(place, metric, name) for name in (*metric._defaults, *names)}
            for place, metric in enumerate(tree.all_of(Metric))
        ]

    def _copy(self, place: int, metric: Metric, name: str) -> Any:
        value = getattr(metric, name)
        if type(value) is not list or len(value) < _LONG or not type(metric).__module__.startswith("torchmetrics."):
            self._known.pop((place, name), None)
            return _copied(value)
        versions = _versions_of(value)
        if versions is None:
            return _clone(value)
        before, versions_before, copies = self._known.get((place, name), ([], [], CopiedList((), [])))
        count = min(len(value), len(before))
        is_same = all(map(operator.is_, value, before)) and versions[:count] == versions_before[:count]
        if is_same and self._is_written(value, copies, count):
            title = f"{type(metric).__name__}.{name}"
            self._report(title, late(-(-count // _IN_TURN)), "once")
            is_same = False
        count *= is_same
        parts = copies.parts if count == len(copies) else copies.parts[: count // _PART_ITEMS]
        copied = CopiedList([*copies[:count], *map(_clone, value[count:])], parts)
        self._known[place, name] = list(value), versions, copied
        return copied

    def _is_written(self, values: list[Any], copies: CopiedList, count: int) -> bool:
        """Return whether one of some tensors has another content than its copy; each time of others."""
        places = {(self._turn * _IN_TURN + n) % count for n in range(_IN_TURN)} if count else ()
        return not all(same_content(plain_of(values[place]), copies[place]) for place in places)


def _versions_of(values: list[Any]) -> list[int] | None:
    """Return the versions of tensors; None if something else is among them, or torch counts no writes to one."""
    if not all(isinstance(value, Tensor) for value in values):
        return None
    try:
        return list(map(data_version, values))
    except RuntimeError:  # made in inference mode
        return None


def as_lists(states: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return states without classes of this package, for checkpoints."""
    return [
        {name: list(value) if isinstance(value, CopiedList) else value for name, value in each.items()}
        for each in states
    ]


def pack_states(states: list[dict[str, Any]], keep: Callable[[dict[str, Any]], dict[str, Any]]) -> plain.Pieces:
    """Pack states, whose long lists are packed in parts.

    Args:
        states: What `MetricStates.copy` has returned.
        keep: Returns what can be packed of a state.
    """
    rows = []
    for state in states:
        long, rest = dict[str, list[bytes]](), dict[str, Any]()
        for name, value in state.items():
            try:
                if isinstance(value, CopiedList):
                    long[name] = value.pack()
                    continue
            except plain.NotPlainError:
                pass  # `keep` tells of it
            rest[name] = list(value) if isinstance(value, CopiedList) else value
        rows.append([rest, long])
    try:
        return plain.pack_in_pieces(rows)
    except plain.NotPlainError:
        return plain.pack_in_pieces([[keep(rest), long] for rest, long in rows])


def unpack_states(packed: bytes) -> list[dict[str, Any]]:
    """Return what `pack_states` was given."""
    return [
        rest | {name: [item for part in parts for item in plain.unpack(part)] for name, parts in long.items()}
        for rest, long in plain.unpack(packed)
    ]


def put_states(modules: Iterable[torch.nn.Module], states: list[dict[str, Any]]) -> None:
    """Restore the states that `MetricStates.copy` returned."""
    metrics = [module for module in modules if isinstance(module, Metric)]
    uses = _uses(metrics)
    for metric, state in zip(metrics, states, strict=True):
        for name, value in state.items():
            own = _original.get(value) if isinstance(value, Tensor) else None
            if own is None and uses[id(getattr(metric, name))] == 1:  # another process has made the copy
                own = getattr(metric, name)
            if (
                isinstance(value, Tensor)
                and isinstance(own, Tensor)
                and not own.requires_grad
                and (own.shape, own.dtype, own.device) == (value.shape, value.dtype, metric.device)
            ):
                fill(plain_of(own), plain_of(value))
                setattr(metric, name, own)
            else:
                setattr(metric, name, _clone(value, metric.device))


def _uses(metrics: Iterable[Metric]) -> Counter[int]:
    """Return for how many states and defaults each object stands; `RunningMean` begins with one for all its window."""
    found = Counter[int]()
    for metric in metrics:
        found.update(id(getattr(metric, name)) for name in metric._defaults)
        found.update(map(id, metric._defaults.values()))
    return found


# The tensors that were copied: code may have other names for them. Those with a graph are new each time.
_original: Final[MutableMapping[Tensor, Tensor]] = WeakTensorKeyDictionary()


def _copied(value: Any) -> Any:
    """Return a copy of a state that knows which object it was copied from."""
    made = _clone(value)
    if isinstance(made, Tensor) and not value.requires_grad:
        _original[made] = value
    return made


def _clone(value: Any, device: torch.device | None = None) -> Any:
    if isinstance(value, Tensor):
        return with_class_of(plain_of(value).to(device or value.device, copy=True), value)
    return [_clone(item, device) for item in value] if isinstance(value, list) else value


def _export(key: str, metric: _ResultMetric) -> dict[str, Any]:
    meta = metric.meta
    names = _TENSORS if metric.is_tensor else _TENSORS_OF_OBJECTS
    tensors = {name: to_plain(getattr(metric, name, None)) for name in names}
    return {
        "key": key,
        "tensors": tensors,
        "has_reset": metric.has_reset,
        "updates": metric._update_count,
        "meta": {name: getattr(meta, name) for name in (*_META, *_META_OPTIONAL)},
        "reduction": next((name for name, fn in _REDUCTIONS.items() if meta.reduce_fx in (fn, name)), "mean"),
        "sync": meta.sync.should,
        "group": meta.sync.group.key if isinstance(meta.sync.group, Handle) else None,
        "rank_zero_only": meta.sync.rank_zero_only,
    }


def _import(metric: _ResultMetric, entry: dict[str, Any], device: torch.device) -> None:
    for name, value in entry["tensors"].items():
        if value is not None or hasattr(metric, name):
            setattr(metric, name, from_plain(value, device))
    metric.has_reset = entry["has_reset"]
    metric._update_count = entry["updates"]


def _new(entry: dict[str, Any], sync: Callable[..., Any], module: torch.nn.Module) -> _ResultMetric:
    meta = _Metadata(**entry["meta"], reduce_fx=_REDUCTIONS[entry["reduction"]])
    group = _group_of(entry.get("group"))  # a checkpoint of an earlier version has none
    meta.sync = _Sync(_should=entry["sync"], fn=sync, rank_zero_only=entry["rank_zero_only"], _group=group)
    metric = _ResultMetric(meta, is_tensor="value" in entry["tensors"])
    if not metric.is_tensor:
        metric.value = module.get_submodule(str(meta.metric_attribute))
    return metric


def _group_of(key: str | None) -> Handle | None:
    """Return the group of this process that has the key which another process has sent."""
    handles = [each for each in registered_groups() if isinstance(each, Handle)] if key is not None else []
    return next((each for each in handles if each.key == key), None)


def to_plain(value: Any) -> list[Any] | None:
    """Return the dtype and the contents of a tensor, None for anything else; JSON keeps every bit of a float."""
    if not isinstance(value, Tensor):
        return None
    return [str(value.dtype).removeprefix("torch."), value.tolist()]


def from_plain(plain: list[Any] | None, device: torch.device) -> Tensor | None:
    """Return the tensor that `to_plain` was given, on ``device``."""
    return None if plain is None else torch.tensor(plain[1], dtype=getattr(torch, plain[0]), device=device)
