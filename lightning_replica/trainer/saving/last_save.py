"""The end of a run that cannot continue: the survivors write a last checkpoint, and every rank ends."""

import logging
from collections.abc import Callable
from typing import NoReturn

from lightning_replica.core.recoverable import HostState
from lightning_replica.errors import CheckpointError, DeviceLostError, RecoveryError, ReplicaError
from lightning_replica.exit_codes import GASP_WRITTEN, NOTHING_SAVED
from lightning_replica.recovery.gasp import GaspPlan
from lightning_replica.sharding.engine import Engine
from lightning_replica.trainer.session import Session

log = logging.getLogger(__name__)


class LastSave:
    """Writes the last checkpoint of a run.

    Args:
        session: The session of this process.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._write: Callable[[GaspPlan], str] | None = None

    def write_with(self, write: Callable[[GaspPlan], str]) -> None:
        """Use ``write``, which returns the path of the checkpoint."""
        self._write = write

    def end(self, state: Engine, host: HostState) -> NoReturn:
        """Write the checkpoint with all ranks that are left, and end this process.

        Raises:
            SystemExit: With a code of `exit_codes`.
        """
        session = self._session
        if self._write is None:
            raise ReplicaError("No directory is set for the last checkpoint.")
        try:
            path = session.gasp().run(state, host, lambda: session.recovery.report(state, host), self._write)
        except DeviceLostError as lost:
            session.exits.without_device(str(lost))
        except (RecoveryError, CheckpointError) as error:
            log.error("rank %d: the last checkpoint could not be written: %s", session.rank, error)
            raise SystemExit(NOTHING_SAVED) from error
        log.info("rank %d: the last checkpoint is %s", session.rank, path)
        raise SystemExit(session.ending.code(GASP_WRITTEN))
