"""The flat gradients of parameters, beside their flat values."""

import math
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from lightning_replica._compat.dtensor import like, local_gradient
from lightning_replica.core.grid import Grid
from lightning_replica.errors import ConfigurationError
from lightning_replica.sharding.carried import Carried
from lightning_replica.sharding.layout import Bucket, ParameterPiece, Range
from lightning_replica.sharding.settings import EngineSettings
from lightning_replica.sharding.values import MAIN_DTYPES, Values, part_of, view_like

_MAIN_GRAD, _ADDED = "main_grad", "grad_added_to_main_grad"  # megatron-core's names
OF_PARAMETERS = (_MAIN_GRAD, _ADDED)
"""Attributes that this package gives to parameters."""


class Buffers(Values):
    """Flat storage of values and gradients. A gradient, once it exists, is a view into ``grads``.

    The arguments and the other attributes are those of `values.Values`.

    Attributes:
        grads: (world_numel,) in the parameters' dtype; in 32 bits if `accumulates`. Backward accumulates here. After a
            reduction, the pieces of the own shard hold the averaged gradient, and after `gather_gradients` all
            pieces do.
        accumulates: Whether gradients of 16 bits are accumulated in 32, apart from the parameters' ``.grad``. Then a
            parameter's ``main_grad`` is its view into ``grads``, as under megatron-core: what finds it there may add to
            it by itself (``gradient_accumulation_fusion``), and sets ``grad_added_to_main_grad``.
        carried: Finds out whether a step uses gradients of earlier batches.
    """

    def __init__(
        self,
        grid: Grid,
        rank: int,
        parameters: Sequence[nn.Parameter],
        order: Sequence[int],
        settings: EngineSettings,
    ) -> None:
        super().__init__(grid, rank, parameters, order, settings)
        self.grads = self.block.grads
        self.accumulates = self.grads.dtype != self.params.dtype
        self.carried = Carried(self.grads.nbytes)
        self._counted = self._counted_ranges(settings.uncounted)
        self._accumulated = [False] * len(self.parameters)  # has a gradient in `grads`; only if `accumulates`
        self._grad_views = [
            view_like(form, self.grads, where) for form, where in zip(self._forms, self.layout.world, strict=True)
        ]
        self._places = [(view.data_ptr(), view.stride()) for view in self._grad_views]
        for index, parameter in enumerate(self.parameters):
            if self.accumulates:
                setattr(parameter, _ADDED, False)
                setattr(parameter, _MAIN_GRAD, self._grad_views[index])
            if parameter.grad is not None:
                self.attach(index)

    def _gradient_dtype(self, dtype: torch.dtype, settings: EngineSettings) -> torch.dtype:
        found = dtype if settings.reduce_dtype is None else MAIN_DTYPES.get(dtype, dtype)
        if found != dtype and (settings.whole_gradients or settings.manual):
            raise ConfigurationError(
                f"reduce_dtype={settings.reduce_dtype!r} keeps the gradients of {dtype} parameters in 32 bits, apart"
                " from `.grad`, but hooks or manual optimization look at `.grad`. Use `reduce_dtype=None`, or"
                " `whole_gradients=False` if they can do without."
            )
        return found

    def attach(self, index: int) -> None:
        """Move a parameter's gradient into ``grads``, if it is not there yet.

        ``zero_grad`` leaves ``None``, so that the first gradient is written and not added. Users get an alias of the
        view: otherwise ``parameter.grad.data = x`` would make the view itself point to other memory than ``grads``.
        """
        gradient = local_gradient(self.parameters[index])
        if gradient is not None and (self.accumulates or self._is_elsewhere(index, gradient)):
            self._move(index, gradient)

    def attach_all(self) -> None:
        """Move every gradient into ``grads``: user code may have replaced some."""
        for index in range(len(self.parameters)):
            self.attach(index)

    def _is_elsewhere(self, index: int, gradient: Tensor) -> bool:
        if gradient.is_sparse:
            return True
        address, strides = self._places[index]
        return gradient.data_ptr() != address or gradient.stride() != strides

    @torch.no_grad()  # under `backward(create_graph=True)` gradients have a graph; the buffer must not have one
    def _move(self, index: int, gradient: Tensor) -> None:
        parameter, view = self.parameters[index], self._grad_views[index]
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        if not self.accumulates:
            view.copy_(gradient)
            parameter.grad = like(parameter, view.detach())
            return
        if getattr(parameter, _ADDED, False):  # the gradient is in the view already, and this one is a dummy
            setattr(parameter, _ADDED, False)
        else:
            view.add_(gradient) if self._accumulated[index] else view.copy_(gradient)
        parameter.grad, self._accumulated[index] = None, True

    def complete(self, bucket: Bucket) -> None:
        """Make all of a bucket's gradients ready to be sent; a missing gradient counts as zero."""
        for index in bucket.parameters:
            self.attach(index)
            if not self._is_present(index):
                part_of(self.grads, self.layout.world[index].overlap(bucket.world)).zero_()

    def present(self) -> list[bool]:
        """Return for every parameter whether it has a gradient on this rank."""
        return [self._is_present(index) for index in range(len(self.parameters))]

    def _is_present(self, index: int) -> bool:
        return self._accumulated[index] if self.accumulates else self.parameters[index].grad is not None

    def show(self, used: Sequence[bool]) -> None:
        """Give every parameter that ``used`` marks its view as gradient, and the others None."""
        for parameter, view, is_used in zip(self.parameters, self._grad_views, used, strict=True):
            parameter.grad = like(parameter, view.detach()) if is_used else None

    def gradients_in(self, flat: Tensor, present: Sequence[bool]) -> dict[nn.Parameter, Tensor]:
        """Return the gradients that ``present`` marks, as views of ``flat``, which is laid out as ``grads``."""
        parts = zip(self.parameters, self._forms, self.layout.world, present, strict=True)
        return {parameter: view_like(form, flat, where) for parameter, form, where, is_present in parts if is_present}

    def drop_gradients(self) -> None:
        """Remove the gradient of every parameter."""
        super().drop_gradients()
        self._accumulated = [False] * len(self.parameters)

    def zero_accumulated(self, set_to_none: bool) -> None:
        """Do for accumulated gradients what ``zero_grad`` does for those in ``.grad``."""
        if not self.accumulates:
            return
        self.grads.zero_()  # in both cases: others may add to `main_grad` without asking
        if set_to_none:
            self._accumulated = [False] * len(self.parameters)

    def scale_gradients(self, factor: float) -> None:
        """Multiply every gradient by ``factor``. The gaps between two stay zero, whatever it is."""
        for part in [self.grads] if math.isfinite(factor) else self._grad_views:
            part.mul_(factor)

    def own_gradients(self) -> list[Tensor]:
        """Return the averaged gradient that this rank counts: over all ranks, each element of the model once."""
        return [part_of(self.grads, where) for where in self._counted]

    @cached_property
    def counted_numel(self) -> int:
        """Number of elements of parameters in `own_gradients`, without the gaps between them."""
        return sum(where.overlap(part).numel for where in self.layout.world for part in self._counted)

    def _counted_ranges(self, uncounted: Collection[int]) -> list[Range]:
        """Return the pieces that this rank has summed, without the parameters that count on another rank."""
        left_out = sorted(
            (where for order, where in zip(self.order, self.layout.world, strict=True) if order in uncounted),
            key=lambda where: where.start,
        )
        return [part for bucket in self.layout.buckets for part in _without(bucket.pieces[self._place], left_out)]

    def gradient_of(self, piece: ParameterPiece) -> Tensor:
        """Return the averaged gradient of a piece, in the dtype of ``main``; a view if parameters have that dtype."""
        return self.world_piece(piece, self.grads).to(self.main.dtype)

    def release(self) -> None:
        """Give every parameter memory of its own again."""
        super().release()
        for parameter in self.parameters if self.accumulates else ():
            delattr(parameter, _MAIN_GRAD)
            delattr(parameter, _ADDED)


def _without(whole: Range, left_out: Sequence[Range]) -> Iterator[Range]:
    """Yield what is left of ``whole`` without the ranges ``left_out``, which are in order and do not overlap."""
    start = whole.start
    for each in left_out:
        gap = whole.overlap(each)
        if gap.numel:
            if gap.start > start:
                yield Range(start, gap.start)
            start = gap.stop
    if start < whole.stop or start == whole.start:
        yield Range(start, whole.stop)
