"""Metrics under way: what `self.log` and torchmetrics have accumulated in this epoch on this rank."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_replica._compat.lightning_names import _Metadata, _ResultCollection, _ResultMetric, _Sync, pl
from lightning_replica._compat.tree import Tree
from lightning_replica.state.objects.contents import plain_of, with_class_of

_TENSORS = ("value", "cumulated_batch_size", "_forward_cache", "_computed")
_TENSORS_OF_OBJECTS = ("_forward_cache", "_computed")
_META = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")
_META_OPTIONAL = ("dataloader_idx", "metric_attribute")
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


def copy_states(tree: Tree) -> list[dict[str, Any]]:
    """Return copies of the states of all torchmetrics objects in a tree."""
    names = ("_update_count", "_computed")
    return [
        {name: _clone(getattr(metric, name)) for name in (*metric._defaults, *names)} for metric in tree.all_of(Metric)
    ]


def put_states(modules: Iterable[torch.nn.Module], states: list[dict[str, Any]]) -> None:
    """Restore the states that `copy_states` returned."""
    metrics = [module for module in modules if isinstance(module, Metric)]
    for metric, state in zip(metrics, states, strict=True):
        for name, value in state.items():
            setattr(metric, name, _clone(value, metric.device))


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
    meta.sync = _Sync(_should=entry["sync"], fn=sync, rank_zero_only=entry["rank_zero_only"])
    metric = _ResultMetric(meta, is_tensor="value" in entry["tensors"])
    if not metric.is_tensor:
        metric.value = module.get_submodule(str(meta.metric_attribute))
    return metric


def to_plain(value: Any) -> list[Any] | None:
    """Return the dtype and the contents of a tensor, None for anything else; JSON keeps every bit of a float."""
    if not isinstance(value, Tensor):
        return None
    return [str(value.dtype).removeprefix("torch."), value.tolist()]


def from_plain(plain: list[Any] | None, device: torch.device) -> Tensor | None:
    """Return the tensor that `to_plain` was given, on ``device``."""
    return None if plain is None else torch.tensor(plain[1], dtype=getattr(torch, plain[0]), device=device)
