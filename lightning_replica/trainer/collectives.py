"""The collectives that Lightning and user code call on a strategy."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_replica._compat.lightning_names import _all_gather_ddp_if_available
from lightning_replica.errors import ReplicaError
from lightning_replica.trainer import objects
from lightning_replica.trainer.joining import Joining
from lightning_replica.trainer.session import Session


class Collectives:
    """Lightning's own collectives, waited for in slices.

    Without a session, and once the run has failed, each returns what this rank has: later hooks must not hide the
    error of the run.

    Attributes:
        session: The session of this process; None until the ranks are set up.
        joining: Joins ranks with different numbers of batches, if the user wants that.
    """

    def __init__(self) -> None:
        self.session: Session | None = None
        self.joining: Joining | None = None

    def connected(self) -> Session:
        """Return the session.

        Raises:
            ReplicaError: If there is none yet.
        """
        if self.session is None:
            raise ReplicaError("The strategy is not set up: call `trainer.fit` (or validate, test, predict) first.")
        return self.session

    @contextmanager
    def by_itself(self) -> Iterator[None]:
        """Make collectives involve no other rank inside the block, and return what this rank has."""
        session, self.session = self.session, None
        try:
            yield
        finally:
            self.session = session

    def barrier(self) -> None:
        """Wait until all ranks have reached this barrier."""
        session = self._met()
        if session is not None:
            session.world.wait(dist.barrier(async_op=True))

    def broadcast(self, obj: Any, src: int) -> Any:
        """Return the object of rank ``src`` on every rank."""
        session = self._met()
        return obj if session is None else objects.broadcast(obj, src, session.world.wait)

    def reduce(self, tensor: Any, group: Any, reduce_op: Any) -> Any:
        """Reduce a tensor over ranks; return anything else unchanged."""
        session = self._met()
        if not isinstance(tensor, Tensor) or session is None:
            return tensor
        return objects.reduce(tensor, group, reduce_op, session.world.wait)

    def all_gather(self, tensor: Tensor, group: Any, sync_grads: bool) -> Tensor:
        """Return the stacked tensors of all ranks."""
        session = self._met()
        if session is None:
            return tensor
        if sync_grads:
            return _all_gather_ddp_if_available(tensor, group=group, sync_grads=True)
        return objects.all_gather(tensor, group, session.world.wait)

    def _met(self) -> Session | None:
        """Return the session through which the other ranks are met; None if this rank is alone.

        Raises:
            ConfigurationError: In a training step that a rank without inputs will not run.
        """
        if self.joining is not None:
            self.joining.check_collective()
        return None if self.session is None or self.session.world.is_over else self.session
