"""What a process leaves for its replacement, and what a replacement finds of its predecessor.

A replacement runs the script from the top. It joins the other ranks in the training loop in which its predecessor was
lost. Until then it reads what its predecessor has left: the results of collectives (control/journal.py), the results of
earlier training loops (state/loop_results.py), and decisions (`Handoff.remembered`).
"""

import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from lightning_replica._compat.lightning import let_config_be_saved_again
from lightning_replica._compat.lightning_names import pl
from lightning_replica.control import keys
from lightning_replica.control.blobs import Blobs
from lightning_replica.control.journal import Journal
from lightning_replica.core.options import RecoveryOptions
from lightning_replica.launch.environment import RankContext
from lightning_replica.launch.standby import call, imported
from lightning_replica.state import logger_runs
from lightning_replica.state.loop_results import LoopResults
from lightning_replica.state.structure import Outline
from lightning_replica.stores.interface import Store

log = logging.getLogger(__name__)


class Handoff:
    """What one rank leaves for its replacement, or has from its predecessor.

    Args:
        store: The supervisor's store.
        rank: This rank.
        same_part: The ranks that have the same part of the model, itself included.
        rank_context: How this process reaches the other ranks. If a supervisor is there, and with recovery, this rank
            leaves what its replacement needs.
        options: What the user has chosen about recovery.

    Attributes:
        is_replacement: Whether this process is a replacement that has not joined the other ranks yet.
        journal: Writes down, or reads back, the results of collectives outside of training loops.
        loop: Number of training loops that have begun.
        armed: Whether a lost rank would be replaced now.
    """

    def __init__(
        self, store: Store, rank: int, same_part: Sequence[int], rank_context: RankContext, options: RecoveryOptions
    ) -> None:
        self._store, self._rank, self.is_replacement = store, rank, rank_context.generation > 0
        self._start_generation, self._supervised = rank_context.generation, rank_context.supervised
        self._recovers = options.recovery
        kept, spool = options.recovery and rank_context.supervised, rank_context.spool
        blobs = None if spool is None else Blobs(spool, None if rank_context.shares_spool else store)
        self.journal = Journal(store, rank, int(store.get(keys.LOOP)) if self.is_replacement else 0, blobs, kept)
        self.loop, self.armed = 0, False
        self._results = LoopResults(blobs if kept else None, rank, same_part)
        self._when_joined: list[Callable[[], None]] = []
        self._decided: Counter[str] = Counter()

    def leave_note(self, topic: str, plain: Any) -> None:
        """Leave plain data for a replacement of this rank."""
        self._store.set(keys.note(self._rank, topic), json.dumps(plain))

    def read_note(self, topic: str) -> Any:
        """Return what this replacement's predecessor has left on ``topic``; None if it has left nothing."""
        key = keys.note(self._rank, topic)
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def remembered(self, topic: str, decide: Callable[[], Any]) -> Any:
        """Return what ``decide`` returns, as plain data; in a replacement, what it returned in its predecessor.

        Args:
            topic: What is decided. It may be decided several times.
            decide: Called where there is no decision yet.
        """
        self._decided[topic] += 1
        note = f"{topic}/{self._decided[topic]}"
        found = self.read_note(note) if self.is_replacement else None
        if found is None:
            found = decide()
            self.leave_note(note, found)
        return found

    def begin_loop(self, meet: Callable[[str], None]) -> None:
        """Begin a training loop. With recovery, a lost rank can be replaced from now on. Called on all ranks.

        Args:
            meet: Waits until all ranks have come to the meeting of a name.
        """
        self.journal.close()
        self.loop += 1
        problem = self._results.write()
        if problem:
            why = f"this script has trained before. {problem}"
            self._store.set(keys.NO_REPLACEMENT, why)
            log.warning("A rank that is lost in this fit cannot be replaced: %s", why)
        self._store.set(keys.LOOP, str(self.loop))
        if not self._recovers:
            return
        meet(keys.armed(self.loop))
        self.armed = True
        self._store.set(keys.PHASE, "fit")
        if self._rank == 0:
            self._call_standbys()

    def end_loop(
        self,
        meet: Callable[[str], None],
        module: nn.Module,
        result: Callable[[], tuple[Outline, bytes, bytes]],
    ) -> None:
        """End a training loop. Ranks are no longer replaced after it. Called on all ranks.

        Args:
            meet: Waits until all ranks have come to the meeting of a name.
            module: The module that the loop has trained.
            result: Returns the outline of the module, and the replicated and the private part of a snapshot.
        """
        if not self._recovers:
            return
        meet(keys.finished(self.loop))
        self.armed = False
        self.training_is_done()
        self._results.keep(self.loop, module, result)
        self.journal.begin_segment()

    def training_is_done(self) -> None:
        """Record that all ranks have agreed to end: a rank that exits from now on is not replaced."""
        self._store.set(keys.PHASE, "done")

    def accept_save_requests(self) -> None:
        """Record that this process waits for requests to save (`planned_save`)."""
        self._store.set(keys.listens(self._rank), str(self._start_generation))

    def _call_standbys(self) -> None:
        """Tell the supervisor that ranks are under way and that it may start standbys."""
        if self._supervised:
            call(self._store, imported())

    def pass_loop(self, module: nn.Module) -> tuple[bytes, bytes] | None:
        """Skip a loop on a replacement that joins in a later one: give ``module`` the weights that the loop ended with.

        Returns:
            The replicated and the private part of the snapshot; None if the loop is not skipped.

        Raises:
            RecoveryError: If the result of the loop is not known.
        """
        if not (self.is_replacement and self.journal.on_the_way):
            return None
        self.loop += 1
        self.journal.begin_segment()
        return self._results.read(self.loop, module)

    def join_loop(self) -> None:
        """Enter the loop in which this replacement joins the other ranks."""
        self.journal.close()
        self.loop += 1

    def leave_out(self, trainer: pl.Trainer, fits: int, writes: bool) -> None:
        """Keep this replacement, until it has joined, from repeating what its predecessor has done once.

        Args:
            trainer: The trainer.
            fits: Number of fits that have begun.
            writes: Whether this rank's loggers write.
        """
        if trainer.num_sanity_val_steps:
            self.when_joined(partial(setattr, trainer, "num_sanity_val_steps", trainer.num_sanity_val_steps))
            trainer.num_sanity_val_steps = 0
        let_config_be_saved_again(trainer)
        runs = self.read_note(f"loggers/{fits}")
        if runs is not None:
            logger_runs.adopt(trainer.loggers, runs, writes=writes)
        logger_runs.mute(trainer.loggers)
        self.when_joined(logger_runs.unmute)

    def when_joined(self, do: Callable[[], None]) -> None:
        """Call ``do`` once this replacement has joined the other ranks."""
        self._when_joined.append(do)

    def has_joined(self) -> None:
        """Mark this replacement as joined, make the calls that `when_joined` has collected, and call for standbys."""
        self.is_replacement = False
        doing, self._when_joined = self._when_joined, []
        for do in doing:
            do()
        self._call_standbys()
