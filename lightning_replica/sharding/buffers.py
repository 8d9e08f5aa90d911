"""The flat tensors, and the parameters and gradients as views into them."""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from lightning_replica._compat.dtensor import like, local_gradient, local_of, set_local
from lightning_replica.core.grid import Grid
from lightning_replica.devices.host import same_bits
from lightning_replica.errors import ConfigurationError
from lightning_replica.sharding.layout import Bucket, Layout, ParameterPiece, Range, plan_layout
from lightning_replica.sharding.settings import EngineSettings
from lightning_replica.sharding.shared import Block

_MAIN_DTYPES = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_MAIN_GRAD, _ADDED = "main_grad", "grad_added_to_main_grad"  # megatron-core's names
_ALIGN_BYTES = 64  # the alignment that torch gives a tensor on CPU; see [Note: alignment] in layout.py


class Buffers:
    """Flat storage of those parameters of one optimizer that share a dtype, a device and a grid.

    Every parameter's ``.data`` becomes a view into ``params``; a gradient, once it exists, a view into ``grads``. Of a
    parameter that tensor ranks share (a DTensor), this is the part that the rank has: nothing here knows of the rest.
    Values and memory format are kept. The shard's own values are in ``main``, apart from ``params``: a gather may
    fail half-way and overwrite any part of ``params``, and user code may write there; neither changes ``main``.

    Args:
        grid: The table of ranks.
        rank: This rank.
        parameters: The parameters to store, of one dtype and device, in registration order.
        order: Position of each parameter among all parameters of the module; decides which is reduced first.
        settings: How the state is sharded.

    Attributes:
        params: (world_numel,) in the parameters' dtype. Forward reads these values.
        grads: (world_numel,) in the parameters' dtype; in 32 bits if `accumulates`. Backward accumulates here. After a
            reduction, the pieces of the own shard hold the averaged gradient, and after `gather_gradients` all
            pieces do.
        main: (local_numel,) in the parameters' dtype, or in 32 bits where that has 16. The shard's values, which the
            optimizer updates.
        block: The memory of these tensors, which ranks of the same machine may read.
        accumulates: Whether gradients of 16 bits are accumulated in 32, apart from the parameters' ``.grad``. Then a
            parameter's ``main_grad`` is its view into ``grads``, as under megatron-core: what finds it there may add to
            it by itself (``gradient_accumulation_fusion``), and sets ``grad_added_to_main_grad``.
        used: For every parameter, whether any rank has a gradient for it, once the ranks have agreed on that.
    """

    def __init__(
        self,
        grid: Grid,
        rank: int,
        parameters: Sequence[nn.Parameter],
        order: Sequence[int],
        settings: EngineSettings,
    ) -> None:
        dtype, device, partition = parameters[0].dtype, parameters[0].device, settings.partition
        main_dtype = _MAIN_DTYPES.get(dtype, dtype)
        grad_dtype = dtype if settings.reduce_dtype is None else main_dtype
        self.accumulates = grad_dtype != dtype
        if self.accumulates and (settings.whole_gradients or settings.manual):
            raise ConfigurationError(
                f"reduce_dtype={settings.reduce_dtype!r} keeps the gradients of {dtype} parameters in 32 bits, apart"
                " from `.grad`, but hooks or manual optimization look at `.grad`. Use `reduce_dtype=None`, or"
                " `whole_gradients=False` if they can do without."
            )
        bucket_numel = max(1, settings.bucket_bytes_on(grid.nodes) // grad_dtype.itemsize)
        align = max(1, _ALIGN_BYTES // dtype.itemsize)
        self.layout: Layout = plan_layout(
            grid, [local_of(p).numel() for p in parameters], bucket_numel, partition, align
        )
        self._place, self.partition = grid.place_of(rank), partition
        self.parameters, self.order = tuple(parameters), tuple(order)
        local_numel = self.layout.local_numels[grid.shard_of(rank)]
        dtypes = grad_dtype, main_dtype, dtype
        shared = settings.shared_memory and grid.size > 1
        self.block = Block(self.layout.world_numel, local_numel, dtypes, device, shared, grid.replicas_span_nodes)
        self.grads, self.main, self.params = self.block.grads, self.block.main, self.block.params
        self.pieces = self.layout.pieces(grid.shard_of(rank))
        self._counted = self._counted_ranges(settings.uncounted)
        self.used = [False] * len(self.parameters)
        self._accumulated = [False] * len(self.parameters)  # has a gradient in `grads`; only if `accumulates`
        self._grad_views: list[Tensor] = []
        for parameter, where in zip(self.parameters, self.layout.world, strict=True):
            values = local_of(parameter).detach()
            view = _view_like(values, self.params, where)
            view.copy_(values)
            self._grad_views.append(_view_like(values, self.grads, where))
            set_local(parameter, view)
            if self.accumulates:
                self._offer_main_grad(parameter)
            if parameter.grad is not None:
                self.attach(len(self._grad_views) - 1)
        self.main_from_params()

    # Gradients

    @torch.no_grad()  # under `backward(create_graph=True)` gradients have a graph; the buffer must not have one
    def attach(self, index: int) -> None:
        """Move a parameter's gradient into ``grads``, if it is not there yet.

        ``zero_grad`` leaves ``None``, so that the first gradient is written and not added. Users get an alias of the
        view: otherwise ``parameter.grad.data = x`` would make the view itself point to other memory than ``grads``.
        """
        parameter, view = self.parameters[index], self._grad_views[index]
        gradient = local_gradient(parameter)
        if gradient is None:
            return
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        if self.accumulates:
            if getattr(parameter, _ADDED, False):  # the gradient is in the view already, and this one is a dummy
                setattr(parameter, _ADDED, False)
            else:
                view.add_(gradient) if self._accumulated[index] else view.copy_(gradient)
            parameter.grad, self._accumulated[index] = None, True
        elif gradient.data_ptr() != view.data_ptr() or gradient.stride() != view.stride():
            view.copy_(gradient)
            parameter.grad = like(parameter, view.detach())

    def complete(self, bucket: Bucket) -> None:
        """Make all of a bucket's gradients ready to be sent; a missing gradient counts as zero."""
        for index in bucket.parameters:
            self.attach(index)
            if not self._is_present(index):
                _part(self.grads, self.layout.world[index].overlap(bucket.world)).zero_()

    def present(self) -> list[bool]:
        """Return for every parameter whether it has a gradient on this rank."""
        return [self._is_present(index) for index in range(len(self.parameters))]

    def _is_present(self, index: int) -> bool:
        return self._accumulated[index] if self.accumulates else self.parameters[index].grad is not None

    def show(self, used: Sequence[bool]) -> None:
        """Give every parameter that ``used`` marks its view as gradient, and the others None."""
        for parameter, view, there in zip(self.parameters, self._grad_views, used, strict=True):
            parameter.grad = like(parameter, view.detach()) if there else None

    def drop_gradients(self) -> None:
        """Remove the gradient of every parameter."""
        for parameter in self.parameters:
            parameter.grad = None
        self._accumulated = [False] * len(self.parameters)

    def zero_accumulated(self, set_to_none: bool) -> None:
        """Do for accumulated gradients what ``zero_grad`` does for those in ``.grad``."""
        if not self.accumulates:
            return
        self.grads.zero_()  # in both cases: others may add to `main_grad` without asking
        if set_to_none:
            self._accumulated = [False] * len(self.parameters)

    def own_gradients(self) -> list[Tensor]:
        """Return the averaged gradient that this rank counts: over all ranks, each element of the model once."""
        return [_part(self.grads, where) for where in self._counted]

    @property
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

    # Values

    def reclaim(self) -> None:
        """Move weights that user code has moved to other memory (``p.data = x``) back into ``params``."""
        for parameter, gradient, where in zip(self.parameters, self._grad_views, self.layout.world, strict=True):
            view = self.params.as_strided(gradient.shape, gradient.stride(), where.start)
            values = local_of(parameter).detach()
            if values.data_ptr() != view.data_ptr():
                view.copy_(values)
                set_local(parameter, view)

    def main_from_params(self) -> None:
        """Take the shard's values from the parameters, but keep 32-bit values that round to the 16-bit parameters."""
        for world, local in self._shard_ranges():
            main, params = _part(self.main, local), _part(self.params, world)
            if main.dtype == params.dtype:
                main.copy_(params)
            else:
                torch.where(params == main.to(params.dtype), main, params.to(main.dtype), out=main)

    def is_params(self) -> bool:
        """Return whether the parameters hold the shard's values; False if user code has written to them."""
        return all(
            same_bits(_part(self.params, world), _part(self.main, local).to(self.params.dtype))
            for world, local in self._shard_ranges()
        )

    def params_from_main(self) -> None:
        """Copy the shard's values into the parameters, before they are gathered."""
        for world, local in self._shard_ranges():
            _part(self.params, world).copy_(_part(self.main, local))

    def piece_of(self, piece: ParameterPiece, flat: Tensor) -> Tensor:
        """Return a piece of a flat tensor laid out as ``main`` is; whole parameters keep their shape."""
        return self._shape(piece, flat, piece.local)

    def world_piece(self, piece: ParameterPiece, flat: Tensor) -> Tensor:
        """Return a piece of a flat tensor laid out as ``params`` is; whole parameters keep their shape."""
        return self._shape(piece, flat, piece.world)

    def gradient_of(self, piece: ParameterPiece) -> Tensor:
        """Return the averaged gradient of a piece, in the dtype of ``main``; a view if parameters have that dtype."""
        return self.world_piece(piece, self.grads).to(self.main.dtype)

    def split(self, piece: ParameterPiece, whole: Tensor) -> Tensor:
        """Return the part of ``whole``, a tensor in the shape of the piece's parameter, that belongs to the piece."""
        form = self._grad_views[piece.parameter]
        flat = torch.empty(form.numel(), dtype=whole.dtype, device=form.device)
        _view_like(form, flat, Range(0, flat.numel())).copy_(whole)
        return self._shape(piece, flat, piece.param).clone()

    def whole(self, index: int, flat: Tensor) -> Tensor:
        """Return parameter ``index`` in a flat tensor laid out as ``params`` is."""
        return _view_like(self._grad_views[index], flat, self.layout.world[index])

    def release(self) -> None:
        """Give every parameter memory of its own again."""
        for parameter in self.parameters:
            parameter.grad = None
            set_local(parameter, local_of(parameter).detach().clone(memory_format=torch.preserve_format))
            if self.accumulates:
                delattr(parameter, _MAIN_GRAD)
                delattr(parameter, _ADDED)

    def _offer_main_grad(self, parameter: nn.Parameter) -> None:
        setattr(parameter, _ADDED, False)
        setattr(parameter, _MAIN_GRAD, self._grad_views[-1])

    def _shape(self, piece: ParameterPiece, flat: Tensor, where: Range) -> Tensor:
        if self.partition == "parameter":
            return _view_like(self._grad_views[piece.parameter], flat, where)
        return _part(flat, where)

    def _shard_ranges(self) -> list[tuple[Range, Range]]:
        grid = self.layout.grid
        places = grid.places_of(grid.shard_at(self._place))
        return [(bucket.pieces[place], bucket.locals[place]) for bucket in self.layout.buckets for place in places]


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


def _part(flat: Tensor, where: Range) -> Tensor:
    return flat[where.start : where.stop]


def _view_like(parameter: Tensor, flat: Tensor, where: Range) -> Tensor:
    """Return a view into ``flat`` with the parameter's shape, and with its strides if its elements leave no holes."""
    if _is_dense(parameter):
        return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset() + where.start)
    return _part(flat, where).view(parameter.shape)


def _is_dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted((st, si) for si, st in zip(tensor.shape, tensor.stride(), strict=True) if si != 1):
        if stride != expected:
            return False
        expected *= size
    return True
