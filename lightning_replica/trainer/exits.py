"""The ways in which a rank's process ends before training is done."""

import logging
import os
import threading
from collections.abc import Callable
from typing import NoReturn

from lightning_replica.control.generation import Generations
from lightning_replica.core import streams
from lightning_replica.core.options import RecoveryOptions
from lightning_replica.core.orphans import ORPHANED
from lightning_replica.exit_codes import DEVICE_LOST
from lightning_replica.launch.environment import RankContext
from lightning_replica.launch.external import Patience

log = logging.getLogger(__name__)


class Exits:
    """Ends this process, or has it end in time.

    Args:
        rank: This rank.
        rank_context: How this process reaches the other ranks.
        options: What the user has chosen about recovery.
        is_armed: Returns whether a lost rank would be replaced now.
    """

    def __init__(
        self, rank: int, rank_context: RankContext, options: RecoveryOptions, is_armed: Callable[[], bool]
    ) -> None:
        self._rank, self._rank_context, self._options, self._is_armed = rank, rank_context, options, is_armed
        self._deadline: threading.Timer | None = None

    def limit_time(self) -> None:
        """Start the time limit of a process that has got a SIGTERM. A supervisor keeps the time itself."""
        if self._options.gasp and not self._rank_context.supervised and self._deadline is None:
            self._deadline = threading.Timer(self._options.grace_s / 2, self._give_up)
            self._deadline.daemon = True
            self._deadline.start()

    def _give_up(self) -> None:
        """Give up the run: half of the grace period is over, and the ranks have not reached the end of a step."""
        generations, why = Generations(self._rank_context.connect()), "The launcher has ended this run."
        if generations.verdict() is None:
            generations.end(why, asked=True)

    def end_waiting(self, generations: Generations, stop_requested: Callable[[], bool]) -> None:
        """Make a recovery that waits in vain end when this process is told to. A supervisor makes this unnecessary.

        Args:
            generations: The log of generations, through which a recovery waits.
            stop_requested: Returns whether this process was told to end.
        """
        if not self._rank_context.supervised:
            generations.wait_with(Patience(self._rank, stop_requested))

    def without_device(self, why: str) -> NoReturn:
        """End this process at once, because anything else might wait for its device. A new process takes its place."""
        log.error("rank %d: its device can no longer be used: %s", self._rank, why)
        streams.flush()
        os._exit(DEVICE_LOST)

    def as_orphan(self) -> None:
        """End this process at once: without the store it cannot continue. Mostly called in the monitor's thread."""
        if not self._rank_context.supervised:
            if not self._is_armed():  # the rank that served the store has ended normally
                return
            log.error("rank %d: the store is gone, and with it rank 0 or the launcher that served it.", self._rank)
        if threading.main_thread().is_alive():
            os._exit(ORPHANED)

    def cancel(self) -> None:
        """Cancel the time limit: this process ends by itself now."""
        if self._deadline is not None:
            self._deadline.cancel()
