"""`FaultInjector`: injects faults into a user's own training."""

import json
import logging
import os
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from lightning_replica._compat.lightning_names import pl
from lightning_replica.chaos.fault_points import FAULT_POINTS, FaultPoint, FaultPointCallback
from lightning_replica.chaos.faults import Dice, FaultKind, InjectedFault, parse_all
from lightning_replica.chaos.flip import flip_bit
from lightning_replica.control import keys
from lightning_replica.control.phase import phase_of
from lightning_replica.core import checks
from lightning_replica.core.lines import append
from lightning_replica.core.points import PHASES
from lightning_replica.errors import ConfigurationError
from lightning_replica.trainer.session import Session
from lightning_replica.trainer.strategy import replica_strategy

log = logging.getLogger(__name__)

EXIT_CODE = 113  # exit code of a rank that an injected "exit" has ended
# Random faults strike here only if the user asks for it: only the writing of sharded checkpoints reaches these places.
_RARE = ("save", "publish", "gasp", "gasp_write", "track")
_USUAL: tuple[FaultPoint, ...] = tuple(point for point in FAULT_POINTS if point not in _RARE)


class Injected(RuntimeError):
    """The exception that a fault of the kind "exception" raises."""


class FaultInjector(FaultPointCallback):
    """Makes ranks fail, to test that the training survives.

        Trainer(strategy="replica_zero", devices=4, callbacks=[FaultInjector("kill:2:forward:30")])

    Each fault strikes once in a run, even if its rank is replaced by a new process. Faults strike only in a script's
    first fit, where a lost rank can be replaced. Listed faults strike when they are due. Random faults are spaced: a
    fault strikes once a step has been made after the fault before it (or in the recovery from that fault, if it does
    not hit the last holder of a shard). So a training with ``replicas=2`` can always survive them.

    Args:
        faults: What strikes, where and when: `InjectedFault`, or "kind:rank:point:step"; one string may hold several,
            separated by commas.
        mtbf_steps: Mean steps between random faults, which come in addition to ``faults``.
        mtbf_s: Mean seconds between random faults; an alternative to ``mtbf_steps``.
        count: Number of random faults.
        seed: The same seed draws the same faults.
        kinds: Kinds of random faults. "hang" needs hang detection, "corrupt" the guard; "sigterm" ends the run.
        points: Where random faults strike; None means everywhere except in the writing of sharded checkpoints.
        spaced: Whether listed faults are spaced like random ones.
        record: A file to which a line of JSON is added for every fault that strikes.

    Raises:
        ConfigurationError: If a value makes no sense, here or as soon as the number of ranks is known.
    """

    def __init__(
        self,
        faults: str | Iterable[str | InjectedFault] = (),
        mtbf_steps: float | None = None,
        mtbf_s: float | None = None,
        count: int = 3,
        seed: int = 0,
        kinds: Sequence[FaultKind] = ("kill", "exception"),
        points: Sequence[FaultPoint] | None = None,
        spaced: bool = False,
        record: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        checks.positive("mtbf_steps", mtbf_steps)
        checks.positive("mtbf_s", mtbf_s)
        checks.whole(1, count=count)
        if mtbf_steps is not None and mtbf_s is not None:
            raise ConfigurationError(f"{mtbf_steps=} and {mtbf_s=} exclude each other: give one of them.")
        self._listed = parse_all(faults)
        self._dice = Dice(seed, tuple(kinds), _USUAL if points is None else tuple(points))
        self._mtbf_steps, self._mtbf_s, self._count = mtbf_steps, mtbf_s, count
        self._spaced, self._record = spaced, None if record is None else Path(record)
        self._mine: dict[int, InjectedFault] = {}  # faults of this rank that may still strike
        self._ledger: _Ledger | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check that the faults can strike here, and draw the random ones.

        Raises:
            ConfigurationError: If a fault names a rank that does not exist, or the trainer has another strategy.
        """
        if stage != "fit":
            return
        session = replica_strategy(trainer, self).session
        world_size = session.world.size
        for fault in self._listed:
            if fault.rank >= world_size:
                raise ConfigurationError(f"{fault} strikes rank {fault.rank}, but the ranks are 0 to {world_size - 1}.")
        everything = [*self._listed, *self._draw(world_size)]
        self._mine = {number: fault for number, fault in enumerate(everything) if fault.rank == session.rank}
        injectors = [callback for callback in trainer.callbacks if isinstance(callback, FaultInjector)]  # type: ignore[attr-defined]
        self._ledger = _Ledger(session, keys.injected(injectors.index(self)))

    def _draw(self, world_size: int) -> list[InjectedFault]:
        if self._mtbf_steps is not None:
            return self._dice.draw(
                [(int(at), 0.0) for at in self._dice.arrivals(self._mtbf_steps, self._count)], world_size
            )
        if self._mtbf_s is not None:
            return self._dice.draw([(0, at) for at in self._dice.arrivals(self._mtbf_s, self._count)], world_size)
        return []

    def reach(self, trainer: pl.Trainer, point: FaultPoint) -> None:
        """Make this rank fail if one of its faults is due at this point."""
        if self._ledger is None or not any(fault.point == point for fault in self._mine.values()):
            return
        state = replica_strategy(trainer, self).state
        for number, fault in list(self._mine.items()):
            if fault.point != point or fault.step > state.step:
                continue
            spaced = self._spaced or number >= len(self._listed)
            if not self._ledger.enter(number, fault, state.step, spaced):
                continue
            del self._mine[number]
            self._write(fault, state.step)
            strike(fault, state, number)

    def _write(self, fault: InjectedFault, step: int) -> None:
        log.warning("rank %d: %s is injected at step %d", fault.rank, fault, step)
        if self._record is not None:
            append(self._record, json.dumps({"fault": str(fault), "step": step, "time": time.time()}) + "\n")


def strike(fault: InjectedFault, state: Any, seed: int) -> None:
    """Carry out a fault in this process.

    Args:
        fault: The fault.
        state: The sharded state.
        seed: Determines which bit is flipped.
    """
    if fault.kind == "kill":
        _end(signal.SIGKILL)
    elif fault.kind == "exit":
        os._exit(EXIT_CODE)
    elif fault.kind == "hang":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.kind == "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)
    elif fault.kind == "memory":
        raise MemoryError(f"injected: {fault}")
    elif fault.kind == "exception":
        raise Injected(str(fault))
    else:
        log.warning("rank %d: %s", fault.rank, flip_bit(state.shard(), seed))


def _end(signum: signal.Signals) -> NoReturn:
    os.kill(os.getpid(), signum)
    raise RuntimeError(f"This process has survived {signum.name}.")


class _Ledger:
    """The record of faults that have struck, in the supervisor's store, where it outlives every rank.

    Args:
        session: This rank's part in the world.
        key: Key of the record in the store.
    """

    def __init__(self, session: Session, key: str) -> None:
        self._session, self._store, self._key = session, session.world.generations.store, key

    def enter(self, number: int, fault: InjectedFault, step: int, spaced: bool) -> bool:
        """Return whether a fault may strike now. If so, record it, so that it never strikes again."""
        if phase_of(self._store) != "fit" or not self._is_time(fault.after_s):
            return False
        while True:
            before = self._store.get(self._key).decode() if self._store.check([self._key]) else ""
            struck = json.loads(before) if before else []
            if any(number == other for other, *_ in struck) or (spaced and not self._has_room(fault, step, struck)):
                return False
            after = json.dumps([*struck, [number, step, fault.rank]])
            if self._store.compare_set(self._key, before, after) == after.encode():
                return True

    def _is_time(self, after_s: float) -> bool:
        if not after_s:
            return True
        now = time.monotonic()  # all processes of one machine read the same clock
        return now - float(self._store.compare_set(f"{self._key}/begun", "", repr(now))) >= after_s

    def _has_room(self, fault: InjectedFault, step: int, struck: list[list[int]]) -> bool:
        """Return whether ranks have surely recovered from all faults, except one if ``fault`` strikes in its recovery.

        Ranks differ by one step at most.
        """
        close = [rank for _, other, rank in struck if abs(step - other) < 2]
        if fault.point in PHASES:
            peers = set(self._session.world.grids.peers(fault.rank)) - {fault.rank}
            return len(close) == 1 and not peers.intersection(close)
        return not close
