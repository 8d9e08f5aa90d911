"""What goes wrong in a fit: noted when it happens, told when it is over."""

import logging
import time

import lightning.pytorch as pl

from lightning_replica.hooks import Hooks
from lightning_replica.messages import say
from lightning_replica.recovery.account import Account
from lightning_replica.recovery.incident import Incident, describe
from lightning_replica.recovery.recovery import Outcome
from lightning_replica.session import Session

log = logging.getLogger(__name__)


class Incidents:
    """Tells of incidents: one rank the user, every rank its callbacks.

    Args:
        trainer: The trainer that fits.
        session: This process's part in the world.
        hooks: Who else wants to know.
    """

    def __init__(self, trainer: pl.Trainer, session: Session, hooks: Hooks) -> None:
        self._trainer, self._session, self._hooks = trainer, session, hooks
        self._account = Account(session.generations, session.rank, session.grid.world_size, session.born)
        self._untold: list[Incident] = []
        self._batches, self._since = 0, time.monotonic()  # begun since the last step, and when the first was

    def batch(self, first_of_window: bool) -> None:
        """A batch begins."""
        if first_of_window:
            self._nothing_begun()
        self._batches += 1

    def good_step(self) -> None:
        """A step is done on this rank."""
        self._account.good_step()
        self._nothing_begun()

    def born(self) -> None:
        """This rank is a replacement: what it does here began with a fault."""
        self._account.fault(self._session.born - 1, 0, 0, 0.0)

    def fault(self, step: int) -> None:
        """A fault has stopped this rank, with ``step`` updates applied."""
        seconds = time.monotonic() - self._since
        self._account.fault(self._session.recovery.generation, step, self._batches, seconds)

    def went_on(self, outcome: Outcome) -> None:
        """A recovery has come through."""
        self._nothing_begun()
        self._untold += self._account.went_on(outcome, self._trainer.current_epoch)

    def _nothing_begun(self) -> None:
        self._batches, self._since = 0, time.monotonic()

    def tell(self, step: int | None) -> None:
        """Tells of incidents that are over.

        Args:
            step: The step that all ranks have done; None at the end of training.
        """
        untold, self._untold = self._untold + self._account.close(step), []
        for incident in untold:
            if incident.teller == self._session.rank:
                say(describe(incident))
            self._hooks.incident(incident)

    def failed(self, error: str, step: int) -> None:
        """The run cannot go on, because of ``error``; nothing that fails here must hide that."""
        try:
            generation, epoch = self._session.recovery.generation, self._trainer.current_epoch
            self._untold.append(self._account.failed(error, generation, step, epoch))
            self.tell(None)
        except Exception:
            log.warning("rank %d: telling of the incident failed", self._session.rank, exc_info=True)
