"""The flat tensors of parameters, and what the shard has of them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_replica._compat.dtensor import local_gradient, local_of, set_local
from lightning_replica.core.grid import Grid
from lightning_replica.devices.host import HOST, same_bits
from lightning_replica.errors import ProtocolError
from lightning_replica.sharding.layout import Layout, ParameterPiece, Range, plan_layout
from lightning_replica.sharding.settings import EngineSettings
from lightning_replica.sharding.shared import Block

MAIN_DTYPES = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_ALIGN_BYTES = 64  # the alignment that torch gives a tensor on CPU; see [Note: alignment] in layout.py
_ALIGN_BYTES_ON_DEVICE = 256  # on a GPU: kernels choose by the alignment, and with it the last bits


class Values:
    """Flat storage of the values of parameters that share an optimizer, a dtype, a device and a grid.

    Every parameter's ``.data`` becomes a view into ``params``. Values and memory format are kept. The shard's own
    values are in ``main``, apart from ``params``: a gather may fail half-way and overwrite any part of ``params``, and
    user code may write there; neither changes ``main``. Gradients are in ``.grad``, the same on all ranks;
    `buffers.Buffers` stores them, too.

    Args:
        grid: The table of ranks.
        rank: This rank.
        parameters: The parameters to store, of one dtype and device, in registration order.
        order: Position of each parameter among all parameters of the module; decides which is reduced first.
        settings: How the state is sharded.

    Attributes:
        params: (world_numel,) in the parameters' dtype. Forward reads these values.
        main: (local_numel,) in the parameters' dtype, or in 32 bits where that has 16. The shard's values, which the
            optimizer updates.
        block: The memory of these tensors, which ranks of the same machine may read.
        main_numels: How many elements of ``main`` the block of each shard has.
        used: For every parameter, whether any rank has a gradient for it, once the ranks have agreed on that.
        shares_params: Whether other ranks of the machine read ``params`` on a single node, too.
    """

    shares_params = False

    def __init__(
        self,
        grid: Grid,
        rank: int,
        parameters: Sequence[nn.Parameter],
        order: Sequence[int],
        settings: EngineSettings,
    ) -> None:
        dtype, device = parameters[0].dtype, parameters[0].device
        on_host = device == HOST
        main_dtype, grad_dtype = MAIN_DTYPES.get(dtype, dtype), self._gradient_dtype(dtype, settings)
        bucket_numel = max(1, settings.bucket_bytes_on(grid.nodes, on_host) // (grad_dtype or dtype).itemsize)
        align = max(1, (_ALIGN_BYTES if on_host else _ALIGN_BYTES_ON_DEVICE) // dtype.itemsize)
        numels = [local_of(parameter).numel() for parameter in parameters]
        self.layout: Layout = plan_layout(grid, numels, bucket_numel, settings.partition, align)
        self._place, self.partition = grid.place_of(rank), settings.partition
        self.parameters, self.order = tuple(parameters), tuple(order)
        world_numel = self.layout.world_numel
        self.main_numels = self._main_numels(main_dtype != dtype)
        self.block = Block(
            0 if grad_dtype is None else world_numel,
            self.main_numels[grid.shard_of(rank)],
            world_numel,
            (grad_dtype or dtype, main_dtype, dtype),
            device,
            settings.shared_memory and grid.size > 1,
            grid.replicas_span_nodes or self.shares_params,
        )
        self.params = self.block.params
        self.main = self._main()
        self.pieces = self.layout.pieces(grid.shard_of(rank))
        self.used = [False] * len(self.parameters)
        self._forms: list[Tensor] = []  # views into `params`
        for parameter, where in zip(self.parameters, self.layout.world, strict=True):
            values = local_of(parameter).detach()
            view = view_like(values, self.params, where)
            view.copy_(values)
            self._forms.append(view)
            set_local(parameter, view)
        self.main_from_params()

    def _gradient_dtype(self, dtype: torch.dtype, settings: EngineSettings) -> torch.dtype | None:
        """Return the dtype of stored gradients; None if there are none."""
        return None

    def _main_numels(self, has_more_bits: bool) -> tuple[int, ...]:
        """Return for each shard how many of its values lie apart from ``params``."""
        return self.layout.local_numels

    def _main(self) -> Tensor:
        """Return where the shard's values lie."""
        return self.block.main

    # Gradients

    def present(self) -> list[bool]:
        """Return for every parameter whether it has a gradient on this rank."""
        return [parameter.grad is not None for parameter in self.parameters]

    def gradient_of(self, piece: ParameterPiece) -> Tensor:
        """Return the gradient of a piece, in the dtype of ``main``."""
        gradient = local_gradient(self.parameters[piece.parameter])
        if gradient is None:
            raise ProtocolError(f"Parameter {self.order[piece.parameter]} has no gradient on this rank.")
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        if gradient.stride() != self._forms[piece.parameter].stride():
            return self.split(piece, gradient).to(self.main.dtype)
        flat = gradient.as_strided((gradient.numel(),), (1,), gradient.storage_offset())
        return self._shape(piece, flat, piece.param).to(self.main.dtype)

    def drop_gradients(self) -> None:
        """Remove the gradient of every parameter."""
        for parameter in self.parameters:
            parameter.grad = None

    def zero_accumulated(self, set_to_none: bool) -> None:
        """Do for gradients that are accumulated apart from ``.grad`` what ``zero_grad`` does for those in it."""

    # Values

    def reclaim(self) -> None:
        """Move weights that user code has moved to other memory (``p.data = x``) back into ``params``."""
        for parameter, view in zip(self.parameters, self._forms, strict=True):
            values = local_of(parameter).detach()
            if values.data_ptr() != view.data_ptr():
                view.copy_(values)
                set_local(parameter, view)

    def retake(self) -> None:
        """Make ``params`` the memory of all weights again, and forget what user code has moved to other memory."""
        for parameter, view in zip(self.parameters, self._forms, strict=True):
            if local_of(parameter).data_ptr() != view.data_ptr():
                set_local(parameter, view)

    def main_from_params(self) -> None:
        """Take the shard's values from the parameters, but keep 32-bit values that round to the 16-bit parameters."""
        for world, local in self.shard_ranges():
            main, params = part_of(self.main, local), part_of(self.params, world)
            if main.dtype == params.dtype:
                main.copy_(params)
            else:
                torch.where(params == main.to(params.dtype), main, params.to(main.dtype), out=main)

    def is_params(self) -> bool:
        """Return whether the parameters hold the shard's values; False if user code has written to them."""
        return all(
            same_bits(part_of(self.params, world), part_of(self.main, local).to(self.params.dtype))
            for world, local in self.shard_ranges()
        )

    def params_from_main(self) -> None:
        """Copy the shard's values into the parameters, before they are gathered."""
        for world, local in self.shard_ranges():
            part_of(self.params, world).copy_(part_of(self.main, local))

    def piece_of(self, piece: ParameterPiece, flat: Tensor) -> Tensor:
        """Return a piece of a flat tensor laid out as ``main`` is; whole parameters keep their shape."""
        return self._shape(piece, flat, piece.local)

    def world_piece(self, piece: ParameterPiece, flat: Tensor) -> Tensor:
        """Return a piece of a flat tensor laid out as ``params`` is; whole parameters keep their shape."""
        return self._shape(piece, flat, piece.world)

    def split(self, piece: ParameterPiece, whole: Tensor) -> Tensor:
        """Return the part of ``whole``, a tensor in the shape of the piece's parameter, that belongs to the piece."""
        form = self._forms[piece.parameter]
        flat = torch.empty(form.numel(), dtype=whole.dtype, device=form.device)
        view_like(form, flat, Range(0, flat.numel())).copy_(whole)
        return self._shape(piece, flat, piece.param).clone()

    def whole(self, index: int, flat: Tensor) -> Tensor:
        """Return parameter ``index`` in a flat tensor laid out as ``params`` is."""
        return view_like(self._forms[index], flat, self.layout.world[index])

    def release(self) -> None:
        """Give every parameter memory of its own again."""
        self.drop_gradients()
        for parameter in self.parameters:
            set_local(parameter, local_of(parameter).detach().clone(memory_format=torch.preserve_format))

    def _shape(self, piece: ParameterPiece, flat: Tensor, where: Range) -> Tensor:
        if self.partition == "parameter":
            return view_like(self._forms[piece.parameter], flat, where)
        return part_of(flat, where)

    def shard_ranges(self) -> list[tuple[Range, Range]]:
        """Return the pieces of the shard: each one's range in ``params``, and its range in ``main``."""
        grid = self.layout.grid
        places = grid.places_of(grid.shard_at(self._place))
        return [(bucket.pieces[place], bucket.locals[place]) for bucket in self.layout.buckets for place in places]


def part_of(flat: Tensor, where: Range) -> Tensor:
    """Return a range of a flat tensor."""
    return flat[where.start : where.stop]


def view_like(parameter: Tensor, flat: Tensor, where: Range) -> Tensor:
    """Return a view into ``flat`` with the parameter's shape, and with its strides if its elements leave no holes."""
    if _is_dense(parameter):
        return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset() + where.start)
    return part_of(flat, where).view(parameter.shape)


def _is_dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted((st, si) for si, st in zip(tensor.shape, tensor.stride(), strict=True) if si != 1):
        if stride != expected:
            return False
        expected *= size
    return True
