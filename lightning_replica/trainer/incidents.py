"""The incidents of a fit: recorded when they happen, reported when they are over."""

import logging
import time

from lightning_replica._compat.lightning_names import pl
from lightning_replica.core.messages import say
from lightning_replica.launch.rank import enter
from lightning_replica.recovery.account import Account
from lightning_replica.recovery.incident import Incident, describe
from lightning_replica.recovery.recovery import Outcome
from lightning_replica.trainer.hooks import Hooks
from lightning_replica.trainer.session import Session

log = logging.getLogger(__name__)


class Incidents:
    """Reports incidents: one rank tells the user, and every rank calls its callbacks.

    Args:
        trainer: The trainer that fits.
        session: The session of this process.
        hooks: Calls the callbacks' hooks.
    """

    def __init__(self, trainer: pl.Trainer, session: Session, hooks: Hooks) -> None:
        self._trainer, self._session, self._hooks = trainer, session, hooks
        self._account = Account(
            session.world.generations, session.rank, session.world.size, session.world.start_generation
        )
        self._unpublished: list[Incident] = []
        self._shown = ""  # the last exception whose traceback was printed
        self._batches, self._since = 0, time.monotonic()  # batches begun since the last step, and when the first began

    def batch(self, first_of_window: bool) -> None:
        """Record that a batch begins."""
        if first_of_window:
            self._nothing_begun()
        self._batches += 1

    def inexact(self, found: dict[str, str]) -> None:
        """Record what is not exact after a recovery."""
        self._account.inexact(found)

    def good_step(self) -> None:
        """Record that this rank has done a step."""
        self._account.good_step()
        self._nothing_begun()
        self._shown = ""

    def started_as_replacement(self) -> None:
        """Record the fault because of which this replacement was started."""
        self._account.fault(self._session.world.start_generation - 1, 0, 0, 0.0)

    def fault(self, step: int) -> None:
        """Record that a fault has stopped this rank, with ``step`` updates applied."""
        seconds = time.monotonic() - self._since
        self._account.fault(self._session.world.generations.current, step, self._batches, seconds)

    def show(self, raised: str, error: Exception) -> None:
        """Print the traceback before anything else, and only once, whichever rank meets the error and however often."""
        rank = enter()
        if rank is not None:
            rank.show(error)
            return
        log.warning("rank %d: %s", self._session.rank, raised, exc_info=None if raised == self._shown else error)
        self._shown = raised

    def went_on(self, outcome: Outcome) -> None:
        """Record that a recovery has succeeded."""
        self._nothing_begun()
        self._unpublished += self._account.went_on(outcome, self._trainer.current_epoch)

    def _nothing_begun(self) -> None:
        self._batches, self._since = 0, time.monotonic()

    def publish(self, step: int | None) -> None:
        """Report the incidents that are over. If a user's hook raises, the rest is reported by the next call.

        Args:
            step: The step that all ranks have done; None at the end of training.
        """
        generations = self._session.world.generations
        self._unpublished += self._account.close(step)
        while self._unpublished:
            incident = self._unpublished.pop(0)
            # The supervisor has said of a run that was asked to end that it was.
            if incident.reporter == self._session.rank and not (incident.failed and generations.stop_was_requested()):
                say(describe(incident))
            self._hooks.incident(incident)

    def failed(self, error: str, step: int) -> None:
        """Report that the run cannot continue because of ``error``. A failure here must not hide that: it is logged."""
        try:
            generation, epoch = self._session.world.generations.current, self._trainer.current_epoch
            self._unpublished.append(self._account.failed(error, generation, step, epoch))
            self.publish(None)
        except Exception:
            log.warning("rank %d: the incident could not be reported", self._session.rank, exc_info=True)
