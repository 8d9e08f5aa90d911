"""The flat tensors, and the parameters and gradients as views into them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_replica.errors import ConfigurationError
from lightning_replica.sharding.layout import Layout


class Buffers:
    """Flat storage of one optimizer's parameters.

    Every parameter's ``.data`` becomes a view into ``params`` and every ``.grad`` one into ``grads``; values are
    kept. The shard's own values live in ``main``, apart from ``params``: a gather may fail half-way and overwrite
    any part of ``params``, it cannot touch ``main``.

    Attributes:
        params: (world_numel,) parameter dtype. What forward reads.
        grads: (world_numel,) parameter dtype. What backward accumulates into; not yet averaged.
        main: (local_numel,) parameter dtype. The shard's values, updated by the optimizer.
        main_grads: (local_numel,) parameter dtype. The shard's averaged gradient, valid between reduction and update.
    """

    def __init__(self, layout: Layout, parameters: Sequence[nn.Parameter], shard: int) -> None:
        dtype, device = _common(parameters)
        self.layout = layout
        self.shard = shard
        self._parameters = tuple(parameters)
        self.params = torch.zeros(layout.world_numel, dtype=dtype, device=device)
        self.grads = torch.zeros_like(self.params)
        self.main = torch.zeros(layout.local_numel, dtype=dtype, device=device)
        self.main_grads = torch.zeros_like(self.main)
        self._grad_views: list[Tensor] = []
        for parameter, where in zip(self._parameters, layout.world, strict=True):
            view = self.params[where.start : where.stop].view(parameter.shape)
            view.copy_(parameter.data)
            parameter.data = view
            self._grad_views.append(self.grads[where.start : where.stop].view(parameter.shape))
        self.attach_gradients()
        self.main_from_params()

    def attach_gradients(self) -> None:
        """Makes every ``.grad`` the view into ``grads`` again; whatever was put in its place is kept.

        ``Module.zero_grad()`` (Lightning calls it before each validation) replaces gradients by ``None``, and
        ``None`` means zero.
        """
        for parameter, view in zip(self._parameters, self._grad_views, strict=True):
            if parameter.grad is view:
                continue
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad.data_ptr() != view.data_ptr():
                view.copy_(parameter.grad)
            parameter.grad = view

    def zero_gradients(self) -> None:
        """Sets all gradients to zero, in place."""
        self.grads.zero_()
        self.attach_gradients()

    def main_from_params(self) -> None:
        """Takes the shard's values from the parameters."""
        for world, local in self._own():
            self.main[local].copy_(self.params[world])

    def params_from_main(self) -> None:
        """Puts the shard's values into the parameters, before they are gathered."""
        for world, local in self._own():
            self.params[world].copy_(self.main[local])

    def _own(self) -> list[tuple[slice, slice]]:
        grid = self.layout.grid
        ranges = [
            (bucket.piece(replica * grid.shards + self.shard), bucket.local(replica))
            for bucket in self.layout.buckets
            for replica in range(grid.replicas)
        ]
        return [(slice(w.start, w.stop), slice(x.start, x.stop)) for w, x in ranges]


def _common(parameters: Sequence[nn.Parameter]) -> tuple[torch.dtype, torch.device]:
    kinds = {(p.dtype, p.device) for p in parameters}
    if len(kinds) != 1 or not parameters[0].is_floating_point():
        given = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ConfigurationError(
            f"All trained parameters must share one floating-point dtype and one device, got {given}."
            " Convert the model (`model.float()`), or freeze the others (`requires_grad_(False)`)."
        )
    return kinds.pop()
