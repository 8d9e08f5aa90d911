"""Tensors that share memory with trained parameters, as a row that a module keeps in an attribute.

A fit moves parameters into flat memory, and gives them memory of their own again when it ends. What shares memory with
them has to follow. A buffer or a parameter that is not trained cannot: its content is restored after a fault apart from
the parameter's. That is reported.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from lightning_replica._compat.dtensor import local_of, set_local
from lightning_replica._compat.lightning_names import pl
from lightning_replica._compat.torch import storage_of
from lightning_replica.core.inexact import Report
from lightning_replica.errors import ConfigurationError
from lightning_replica.state.reachable import Survey

_CANNOT_FOLLOW: Final = "it shares memory with the parameter {}, in a way in which it cannot follow its updates"


class _Span(NamedTuple):
    """Where a parameter lies in its memory, in elements."""

    name: str
    parameter: nn.Parameter
    start: int
    stop: int
    dense: bool  # so that each element between is its own


class _Alias(NamedTuple):
    """A tensor in a parameter's memory, and how far behind the parameter's first element it begins."""

    name: str
    tensor: Tensor
    span: _Span
    behind: int
    strides: tuple[int, ...]  # of the parameter


class Aliases:
    """Finds tensors that share memory with trained parameters, and makes them follow.

    Args:
        trainer: The trainer, with its optimizers set up, before parameters are moved.
        survey: What the objects of the user lead to.
        report: Called with what cannot follow.

    Raises:
        ConfigurationError: If two trained parameters share memory.
    """

    def __init__(self, trainer: pl.Trainer, survey: Survey, report: Report) -> None:
        module = trainer.lightning_module
        self._report = report
        self._spans: dict[int, list[_Span]] = {}
        named = dict(module.named_parameters())
        trained = {id(p) for each in trainer.optimizers for group in each.param_groups for p in group["params"]}
        for name, parameter in named.items():
            if id(parameter) in trained and parameter.requires_grad:
                self._add(name, parameter)
        rest = {name: each for name, each in named.items() if id(each) not in trained}
        for name, tensor in {**rest, **dict(module.named_buffers())}.items():
            for span in self._spans_under(tensor):
                report(
                    f"module.{name}",
                    f"it shares memory with the parameter {span.name}, but it does not follow its updates: use the"
                    " parameter itself, or an attribute that is no buffer",
                    "fault",
                )
        self._found = list(self._aliases(survey.tensors()))

    def _add(self, name: str, parameter: nn.Parameter) -> None:
        own = local_of(parameter)
        memory = storage_of(own)
        start = int(own.storage_offset())
        span = _Span(name, parameter, start, start + _extent(own), own.is_contiguous())
        for other in self._spans.get(memory, []) if memory else ():
            if _overlap(span, other.start, other.stop) and own.is_contiguous() and other.dense:
                raise ConfigurationError(
                    f"The parameters {other.name} and {name} share memory, but they are two parameters, and each would"
                    " be trained apart. Use one parameter in both places."
                )
        if memory and span.start < span.stop:
            self._spans.setdefault(memory, []).append(span)

    def _spans_under(self, tensor: Tensor) -> list[_Span]:
        if nn.parameter.is_lazy(tensor):
            return []
        own = local_of(tensor)
        start = int(own.storage_offset()) if storage_of(own) in self._spans else 0
        return [each for each in self._spans.get(storage_of(own), []) if _overlap(each, start, start + _extent(own))]

    def _aliases(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[_Alias]:
        for name, tensor in tensors:
            spans = self._spans_under(tensor)
            if not spans:
                continue
            own = local_of(tensor)
            (span, *others), start = spans, int(own.storage_offset())
            inside = span.start <= start and start + _extent(own) <= span.stop
            if others or not inside or own.dtype != span.parameter.dtype:
                self._report(name, _CANNOT_FOLLOW.format(span.name))
                continue
            yield _Alias(name, tensor, span, start - span.start, local_of(span.parameter).stride())

    def follow(self) -> None:
        """Move the tensors to where the parameters lie now."""
        for name, tensor, span, behind, strides in self._found:
            own, present = local_of(span.parameter).detach(), local_of(tensor)
            if own.stride() != strides:
                self._report(name, _CANNOT_FOLLOW.format(span.name))
            elif storage_of(own) != storage_of(present):
                moved = torch.as_strided(own, present.shape, present.stride(), own.storage_offset() + behind)
                set_local(tensor, moved)


def _extent(tensor: Tensor) -> int:
    """Return the number of elements from a tensor's first to its last one in memory."""
    sizes: Sequence[tuple[int, int]] = list(zip(tensor.shape, tensor.stride(), strict=True))
    return 1 + sum((size - 1) * stride for size, stride in sizes) if tensor.numel() else 0


def _overlap(span: _Span, start: int, stop: int) -> bool:
    return max(span.start, start) < min(span.stop, stop)
