"""One process's part in the world: its connections, its process groups, how it joins and how it leaves."""

import atexit
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import timedelta
from typing import Any, NoReturn

import lightning
import torch.distributed as dist
from torch import Tensor, nn

from lightning_replica.checkpoint.together import TogetherBeside
from lightning_replica.control import agreement, keys, planned_save
from lightning_replica.control.faults import Fault
from lightning_replica.control.generation import Generations
from lightning_replica.control.monitor import Monitor
from lightning_replica.core import points
from lightning_replica.core.grid import Grid
from lightning_replica.core.options import RecoveryOptions
from lightning_replica.core.orphans import ORPHANED
from lightning_replica.core.works import Ordered, Work, finish, wait
from lightning_replica.devices.interface import Device, is_apart
from lightning_replica.errors import CollectiveError, ConfigurationError, Interrupted
from lightning_replica.exit_codes import DEVICE_LOST
from lightning_replica.groups.membership import Groups, make_groups
from lightning_replica.groups.world import ProcessGroups
from lightning_replica.launch import stacks
from lightning_replica.launch.beacons import VARIABLE, Beacon, HangLimits
from lightning_replica.launch.ending import Ending
from lightning_replica.launch.environment import Surroundings
from lightning_replica.launch.external import Patience, roll_call
from lightning_replica.launch.standby import call, imported
from lightning_replica.recovery.context import RecoveryContext
from lightning_replica.recovery.gasp import Gasp
from lightning_replica.recovery.mirror import Mirrors
from lightning_replica.recovery.recovery import Recovery
from lightning_replica.sharding.engine import Engine
from lightning_replica.trainer.succession import Succession

log = logging.getLogger(__name__)

# How often a busy rank checks whether the next generation has begun; without recovery, only whether the run has ended.
_LOOKS_S, _SELDOM_LOOKS_S = 0.5, 1.0


class Session:
    """One process's part in the world, from the start of the rank to its end.

    Args:
        grid: The table of ranks.
        rank: This rank.
        surroundings: How this process reaches the other ranks.
        device: The device that this rank trains on.
        timeout_s: Time after which a collective fails on its own, in seconds.
        options: What the user has chosen about recovery.

    Attributes:
        born: The generation that this process was born into.
        fits: Number of fits that have begun.
        succession: What this process leaves to a replacement, or has from its predecessor.
        ending: Records how the run ends.
        is_over: Whether the run has ended before its time. Ranks no longer communicate then.
    """

    def __init__(
        self,
        grid: Grid,
        rank: int,
        surroundings: Surroundings,
        device: Device,
        timeout_s: float,
        options: RecoveryOptions,
    ) -> None:
        self.grid, self.rank, self.device = grid, rank, device
        planned_save.ignore()
        newborn = surroundings.generation > 0
        self._show_progress(options, newborn)
        self._timeout_s, self.options = timeout_s, options
        self._surroundings, self._armed = surroundings, False
        store = surroundings.connect()
        self.generations = Generations(store, surroundings.generation)
        self.ending = Ending(store, grid.world_size, surroundings.supervised)
        self.is_over = False
        kept = options.recovery and surroundings.supervised
        self.succession = Succession(store, rank, grid.world_size, newborn, surroundings.spool, kept)
        journal = self.succession.journal
        self._process_groups = ProcessGroups(store, rank, grid.world_size, device, timeout_s, self.look, journal)
        watched = Generations(surroundings.connect())
        interval_s = _LOOKS_S if options.recovery else _SELDOM_LOOKS_S
        self._monitor = Monitor(watched, self._wake, self.end_as_orphan, interval_s)
        self._monitor.start(surroundings.generation)
        self.born = surroundings.generation
        self.fits = 0
        self._beside = (-1, 0)  # generation, and number of the newest call of `beside` in it
        self._deadline: threading.Timer | None = None
        self.mirrors = Mirrors(rank, self.wait)
        self._state: Engine | None = None
        self._groups: Groups | None = None
        self._compare_worlds()
        if newborn:
            self._process_groups.hold()
        else:
            self._process_groups.open(0, self._make_groups)
        atexit.register(self._close_at_exit)  # gloo's threads must end before the interpreter does

    @property
    def newborn(self) -> bool:
        """Whether this process is a replacement that has not joined the other ranks yet."""
        return self.succession.newborn

    def _show_progress(self, options: RecoveryOptions, newborn: bool) -> None:
        """Show this rank's progress and, on request, its stacks to the supervisor from now on."""
        limits = HangLimits.of(options)
        if VARIABLE in os.environ and options.recovery and not limits.off:
            path = os.environ[VARIABLE]
            try:
                points.watch(Beacon(path, self.rank, limits, stacks.answer(), newborn))
            except OSError as error:
                log.warning("rank %d: a hang will not be noticed: %s", self.rank, error)

    def _compare_worlds(self) -> None:
        """Check that all ranks agree, before any waits in a process group that a deviating rank would never join."""
        facts = {
            "replicas": self.grid.replicas,
            **agreement.versions(),
            "lightning": lightning.__version__,
            **asdict(self.options),
            "_node": agreement.node(),
        }
        advice = "Start every rank from the same script, with the same options, in the same environment."
        timeout_s = self.options.rendezvous_timeout_s
        everyone = agreement.compare(self.generations, keys.WORLD, self.rank, self.grid, facts, advice, timeout_s)
        together = self.grid.together([each["_node"] for each in everyone])
        if together and self.rank == 0:
            log.warning(
                "Shards %s are held by several ranks of one node: losing that node loses them. Choose `replicas` so"
                " that the ranks of a replica, world_size / replicas, fill whole nodes.",
                ", ".join(map(str, together)),
            )

    def compare_models(self, module: nn.Module) -> None:
        """Check that all ranks are about to train the same parameters."""
        topic, timeout_s = keys.model(self.fits), self.options.rendezvous_timeout_s
        agreement.compare_models(self.generations, topic, self.rank, self.grid, module, timeout_s)

    def attach(self, state: Engine, hook: Callable[[RecoveryContext], None] | None) -> None:
        """Begin a fit: ``state`` uses this session's groups, now and after every regroup.

        Args:
            state: The sharded state.
            hook: Called in every phase of a recovery; None if no callback has a hook.
        """
        self._state = state
        self.fits += 1
        self.mirrors = Mirrors(self.rank, self.wait)
        self.recovery = Recovery(
            self.grid,
            self.rank,
            self.generations,
            self._process_groups,
            self._monitor,
            self.mirrors,
            self._make_groups,
            self.wait,
            self.options,
            hook,
        )
        if self._groups is not None:
            self.mirrors.connect(self._groups.peers, self.grid.peers(self.rank))
            state.connect(self._groups, self.look)

    def check(self) -> None:
        """Raise `Interrupted` if this rank's generation is known to be over."""
        self._monitor.check()

    def look(self) -> None:
        """Check like `check`, and have the monitor look at once. A waiting rank calls this again and again."""
        self._monitor.look()

    def wait(self, work: Work, tensor: Tensor | None = None) -> None:
        """Wait for a collective to end.

        Args:
            work: What an ``async_op=True`` collective returned.
            tensor: The tensor of the collective; None if it is in host memory.
        """
        if self.succession.journal.mode == "reading":
            return  # the journal has answered; a replacement that has not joined yet ignores new generations
        if isinstance(work, dist.Work) and tensor is not None and is_apart(self.device, tensor):
            wait(Ordered(work), self.look)
            finish(self.look)
        else:
            wait(work, self.look)

    @property
    def groups(self) -> Groups:
        """The process groups of this generation."""
        if self._groups is None:
            raise CollectiveError("This replacement has not joined the others yet; no collective is possible.")
        return self._groups

    def arm(self) -> None:
        """Begin a training loop. With recovery, a lost rank can be replaced from now on."""
        self.succession.begin_loop()
        if not self.options.recovery:
            return
        name = keys.armed(self.succession.loop)
        self.generations.meet(name, self.generations.current, self.grid.world_size, self.options.rendezvous_timeout_s)
        self._armed = True
        self.generations.store.set(keys.PHASE, "fit")
        if self.rank == 0:
            self.call_standbys()

    def has_joined(self) -> None:
        """Mark this replacement as joined, and call for standbys."""
        self.succession.has_joined()
        self.call_standbys()

    def call_standbys(self) -> None:
        """Tell the supervisor that ranks are under way and that it may start standbys."""
        if self._surroundings.supervised:
            call(self.generations.store, imported())

    def disarm(self, module: nn.Module, result: Callable[[], tuple[bytes, bytes]]) -> None:
        """End a training loop on every rank; ranks are no longer replaced after it. See `Succession.end_loop`."""
        if not self.options.recovery:
            return
        name = keys.finished(self.succession.loop)
        self.generations.meet(name, self.generations.current, self.grid.world_size, self.options.rendezvous_timeout_s)
        self._armed = False
        self.generations.store.set(keys.PHASE, "done")
        self.succession.end_loop(module, result)

    def leave(self) -> None:
        """Mark training as done: all ranks have agreed to end, and a rank that exits is not replaced."""
        self.generations.store.set(keys.PHASE, "done")

    def listens(self) -> None:
        """Announce that this rank can be asked to save (`planned_save`)."""
        self.generations.store.set(keys.listens(self.rank), str(self.born))

    def beside(self) -> TogetherBeside:
        """Return a `TogetherBeside` for work beside training, until the next generation begins. Called on all ranks."""
        generation, store = self.generations.current, self._surroundings.connect()
        number = self._beside[1] + 1 if self._beside[0] == generation else 0
        self._beside = generation, number
        generations = Generations(store)

        def check() -> None:
            if generations.begun(generation + 1):
                raise Interrupted(f"generation {generation} is over")

        return TogetherBeside(store, keys.beside(generation, number), self.rank, self.grid.world_size, check)

    def gasp(self) -> Gasp:
        """Return this rank's part in the dying gasp. Called once the run has been given up."""
        return Gasp(
            self.grid,
            self.rank,
            self.generations,
            self._process_groups,
            self._monitor,
            self._exchange_last,
            self.options.rendezvous_timeout_s,
        )

    def _exchange_last(self, generation: int, plain: dict[str, Any]) -> list[dict[str, Any]]:
        """Exchange data with the ranks that are left: by the supervisor's record, or else all ranks that come."""
        topic, generations = keys.gasping(generation), self.generations
        if not self._surroundings.supervised:
            return roll_call(generations, topic, self.rank, plain, generation, self.grid.world_size)
        lost = generations.lost(generation)
        left = [rank for rank in range(self.grid.world_size) if rank not in lost]
        timeout_s = self.options.rendezvous_timeout_s
        return generations.share(topic, self.rank, plain, generation, left, timeout_s, given_up=True)

    def told_to_end(self) -> None:
        """Start the time limit of a process that has got a SIGTERM. A supervisor keeps the time itself."""
        if self.options.gasp and not self._surroundings.supervised and self._deadline is None:
            self._deadline = threading.Timer(self.options.grace_s / 2, self._give_up)
            self._deadline.daemon = True
            self._deadline.start()

    def _give_up(self) -> None:
        """Give up the run: half of the grace period is over, and the ranks have not reached the end of a step."""
        generations, why = Generations(self._surroundings.connect()), "The launcher has ended this run."
        if generations.verdict() is None:
            generations.give_up(why, asked=True)
            generations.begin_next(0, Fault("end", (), why))

    def _close_at_exit(self) -> None:
        """Close the session at exit. Ignore Ctrl-C, which a terminal sends to all ranks: it has nothing left to end."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.close()

    def close(self) -> None:
        """Leave the world."""
        atexit.unregister(self._close_at_exit)
        if self._deadline is not None:
            self._deadline.cancel()
        self.let_go()
        self._process_groups.close()
        if not self._surroundings.supervised:
            self._surroundings.leave(self.grid.world_size, failed=self.generations.verdict() is not None)

    def _wake(self) -> None:
        """End what this rank waits for, here and on the device: its generation is over. Called in the monitor's thread.

        The device is stopped first: an aborted collective leaves arbitrary data in its tensors, and nothing must be
        computed from that. The device of a replacement that has not joined yet is not stopped: it needs no other rank.
        """
        if self.succession.journal.mode != "reading":
            self.device.stop()
        self._process_groups.abort()

    def let_go(self) -> None:
        """Stop the monitor and restart the device: the run has ended, and reporting its error may need the device."""
        self.is_over = True
        self._monitor.stop()
        try:
            self.device.restart()
        except RuntimeError as error:
            log.warning("rank %d: its device cannot be used any more: %s", self.rank, error)

    def leave_without_device(self, why: str) -> NoReturn:
        """End this process at once, because anything else might wait for its device. A new process takes its place."""
        log.error("rank %d: its device cannot be used any more: %s", self.rank, why)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(DEVICE_LOST)

    def end_when_told(self, told_to_end: Callable[[], bool]) -> None:
        """Make a recovery that waits in vain end when this process is told to. A supervisor makes this unnecessary."""
        if not self._surroundings.supervised:
            self.generations.wait_with(Patience(self.rank, told_to_end))

    def end_as_orphan(self) -> None:
        """End this process at once: without the store it cannot continue. Mostly called in the monitor's thread."""
        if not self._surroundings.supervised:
            if not self._armed:  # the rank that served the store has ended normally
                return
            log.error("rank %d: the store is gone, and with it rank 0 or the launcher that served it.", self.rank)
        if threading.main_thread().is_alive():
            os._exit(ORPHANED)

    def _make_groups(self, timeout: timedelta) -> Iterable[dist.ProcessGroup]:
        self._groups = make_groups(self.grid, self.rank, timeout, self.device.is_host)
        self.mirrors.connect(self._groups.peers, self.grid.peers(self.rank))
        if self._state is not None:
            self._state.connect(self._groups, self.look)
        return self._groups.all()


_current: Session | None = None


def join(
    grid: Grid,
    rank: int,
    enter: Callable[[], Surroundings],
    device: Device,
    timeout_s: float,
    options: RecoveryOptions,
) -> Session:
    """Return this process's session: there is one, however many trainers and fits there are.

    Raises:
        ConfigurationError: If the run has failed before, or an earlier trainer had another number of ranks.
    """
    global _current
    if _current is None:
        _current = Session(grid, rank, enter(), device, timeout_s, options)
    verdict = _current.generations.verdict()
    if verdict is not None:
        raise ConfigurationError(
            f"An earlier run of this script has failed, and its world of ranks with it: {verdict}"
            " Start the script again; one process fails only once."
        )
    if _current.grid != grid:
        raise ConfigurationError(
            f"An earlier trainer of this script ran with {_current.grid}, this one asks for {grid}."
            " Use the same `devices` and `replicas` in one script."
        )
    return _current
