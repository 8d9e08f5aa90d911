"""The collectives that Lightning and user code call on a strategy."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_replica._compat.lightning_names import ParallelStrategy, _all_gather_ddp_if_available
from lightning_replica.errors import ReplicaError
from lightning_replica.trainer import objects
from lightning_replica.trainer.joining import Joining
from lightning_replica.trainer.lengths import check_sized
from lightning_replica.trainer.session import Session


class LightningCollectives(ParallelStrategy):
    """Lightning's own collectives, waited for in slices."""

    _session: Session | None
    joining: Joining | None = None

    @property
    def session(self) -> Session:
        """The session of this process."""
        if self._session is None:
            raise ReplicaError("The strategy is not set up: call `trainer.fit` (or validate, test, predict) first.")
        return self._session

    @property
    def _met(self) -> Session | None:
        """The session for collectives; None once the run has failed, because later hooks must not hide its error.

        Raises:
            ConfigurationError: In a training step that a rank without inputs will not run.
        """
        if self.joining is not None:
            self.joining.check_collective()
        return None if self._session is None or self._session.world.is_over else self._session

    @contextmanager
    def by_itself(self) -> Iterator[None]:
        """Make Lightning's collectives involve no other rank inside the block, and return what this rank has."""
        session, self._session = self._session, None
        try:
            yield
        finally:
            self._session = session

    def process_dataloader(self, dataloader: object) -> object:
        """Check that all ranks can tell the length of this data, or none."""
        check_sized(dataloader, self)
        return dataloader

    def barrier(self, name: str | None = None) -> None:
        """Wait until all ranks have reached this barrier."""
        if self._met is not None:
            self._met.world.wait(dist.barrier(async_op=True))

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank ``src`` on every rank."""
        session = self._met
        return obj if session is None else objects.broadcast(obj, src, session.world.wait)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over ranks; return anything else unchanged."""
        session = self._met
        if not isinstance(tensor, Tensor) or session is None:
            return tensor
        return objects.reduce(tensor, group, reduce_op, session.world.wait)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the stacked tensors of all ranks."""
        session = self._met
        if session is None:
            return tensor
        if sync_grads:
            return _all_gather_ddp_if_available(tensor, group=group, sync_grads=True)
        return objects.all_gather(tensor, group, session.world.wait)
