"""One process's part in the world: its connections, its groups, its way in and out."""

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

import torch.distributed as dist
from torch import Tensor, nn

from lightning_replica import agreement, planned_save, points
from lightning_replica.checkpoint.together import TogetherBeside
from lightning_replica.devices.interface import Device, is_apart
from lightning_replica.errors import CollectiveError, ConfigurationError, Interrupted
from lightning_replica.exit_codes import DEVICE_LOST
from lightning_replica.grid import Grid
from lightning_replica.launch import stacks
from lightning_replica.launch.beacons import VARIABLE, Beacon, HangLimits
from lightning_replica.launch.ending import Ending
from lightning_replica.launch.environment import Surroundings
from lightning_replica.launch.external import Patience, roll_call
from lightning_replica.launch.orphans import ORPHANED
from lightning_replica.launch.standby import call, imported
from lightning_replica.launch.supervisor import PHASE
from lightning_replica.planned_save import LISTENS
from lightning_replica.recovery.context import RecoveryContext
from lightning_replica.recovery.faults import Fault
from lightning_replica.recovery.gasp import Gasp
from lightning_replica.recovery.generation import Generations
from lightning_replica.recovery.groups import ProcessGroups
from lightning_replica.recovery.mirror import Mirrors
from lightning_replica.recovery.monitor import Monitor
from lightning_replica.recovery.options import RecoveryOptions
from lightning_replica.recovery.recovery import Recovery
from lightning_replica.sharding.collectives import Groups, make_groups
from lightning_replica.sharding.state import ShardedState
from lightning_replica.succession import Succession
from lightning_replica.works import Ordered, Work, finish, wait

log = logging.getLogger(__name__)

# How often a rank that is busy looks whether the world moves on; without recovery, only whether the run has ended.
_LOOKS_S, _SELDOM_LOOKS_S = 0.5, 1.0


class Session:
    """What lasts from the start of a rank to its end.

    Args:
        grid: The table of ranks.
        rank: This rank.
        surroundings: How this process reaches the others.
        device: What this rank trains on.
        timeout_s: After which a collective fails on its own.
        options: What the user has chosen about recovery.

    Attributes:
        born: The generation that this process was born into.
        fits: Fits that have begun.
        succession: What this process leaves to a replacement, or has from its predecessor.
        ending: How the run ends.
        is_over: Whether it has ended, without having come to its end: no rank hears from another one any more.
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
        self.generations = Generations(store)
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
        self._generation = self.born = surroundings.generation
        self.fits = 0
        self._beside = (-1, 0)  # generation, and how often `beside` was called in it
        self._deadline: threading.Timer | None = None
        self.mirrors = Mirrors(rank, self.wait)
        self._state: ShardedState | None = None
        self._groups: Groups | None = None
        self._compare_worlds()
        if newborn:
            self._process_groups.hold()
        else:
            self._process_groups.open(0, self._make_groups)
        atexit.register(self._close_at_exit)  # gloo's threads must end before the interpreter does

    @property
    def newborn(self) -> bool:
        """Whether this process is a replacement that has not joined the others yet."""
        return self.succession.newborn

    def _show_progress(self, options: RecoveryOptions, newborn: bool) -> None:
        """From here on the supervisor sees how far this rank is, and can have its stacks."""
        limits = HangLimits.of(options)
        if VARIABLE in os.environ and options.recovery and not limits.off:
            path = os.environ[VARIABLE]
            try:
                points.watch(Beacon(path, self.rank, limits, stacks.answer(), newborn))
            except OSError as error:
                log.warning("rank %d: a hang will not be noticed: %s", self.rank, error)

    def _compare_worlds(self) -> None:
        """Before anyone waits in a process group, which a rank with other ideas would never join."""
        facts = {
            "replicas": self.grid.replicas,
            **agreement.versions(),
            **asdict(self.options),
            "_node": agreement.node(),
        }
        advice = "Start every rank from the same script, with the same options, in the same environment."
        everyone = agreement.compare(
            self.generations,
            "world",
            self.rank,
            self.grid,
            facts,
            advice,
            self._generation,
            self.options.rendezvous_timeout_s,
        )
        together = self.grid.together([each["_node"] for each in everyone])
        if together and self.rank == 0:
            log.warning(
                "Shards %s are held by several ranks of one node: losing that node loses them. Choose `replicas` so"
                " that the ranks of a replica, world_size / replicas, fill whole nodes.",
                ", ".join(map(str, together)),
            )

    def compare_models(self, module: nn.Module) -> None:
        """Makes sure that all ranks are about to train the same parameters."""
        topic = f"model/{self.fits}"
        agreement.compare_models(
            self.generations, topic, self.rank, self.grid, module, self._generation, self.options.rendezvous_timeout_s
        )

    def attach(self, state: ShardedState, hook: Callable[[RecoveryContext], None] | None) -> None:
        """A fit begins: ``state`` uses this session's groups, now and after every regroup.

        Args:
            state: The sharded state.
            hook: Called in every phase of a recovery; None if nobody wants to be told.
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
        self.recovery.generation = self._generation
        if self._groups is not None:
            self.mirrors.connect(self._groups.peers, self.grid.peers(self.rank))
            state.connect(self._groups, self.look)

    def check(self) -> None:
        """Raises `Interrupted` if the world is known to have moved on."""
        self._monitor.check()

    def look(self) -> None:
        """The same for whoever waits, again and again."""
        self._monitor.look()

    def wait(self, work: Work, tensor: Tensor | None = None) -> None:
        """Waits for a collective to end.

        Args:
            work: What an ``async_op=True`` collective returned.
            tensor: What it is done on; None for one of the host's own.
        """
        if self.succession.journal.mode == "reading":
            return  # it is answered; a generation that begins meanwhile is no concern of a replacement on its way
        if isinstance(work, dist.Work) and tensor is not None and is_apart(self.device, tensor):
            wait(Ordered(work), self.look)
            finish(self.look)
        else:
            wait(work, self.look)

    @property
    def groups(self) -> Groups:
        """The groups of this generation."""
        if self._groups is None:
            raise CollectiveError("This replacement has not joined the others yet; no collective is possible.")
        return self._groups

    def arm(self) -> None:
        """From here on a lost rank can be replaced."""
        self.succession.begin_loop()
        if not self.options.recovery:
            return
        name = f"armed/{self.succession.loop}"
        self.generations.meet(name, self._generation, self.grid.world_size, self.options.rendezvous_timeout_s)
        self._armed = True
        self.generations.store.set(PHASE, "fit")
        if self.rank == 0:
            self.call_standbys()

    def has_joined(self) -> None:
        """This replacement is one of the others now."""
        self.succession.has_joined()
        self.call_standbys()

    def call_standbys(self) -> None:
        """Ranks are under way: the supervisor may start processes that wait."""
        if self._surroundings.supervised:
            call(self.generations.store, imported())

    def disarm(self, module: nn.Module, result: Callable[[], tuple[bytes, bytes]]) -> None:
        """Training is over on every rank; nobody needs to be replaced any more. See `Succession.end_loop`."""
        if not self.options.recovery:
            return
        self._generation = self.recovery.generation
        name = f"finished/{self.succession.loop}"
        self.generations.meet(name, self._generation, self.grid.world_size, self.options.rendezvous_timeout_s)
        self._armed = False
        self.generations.store.set(PHASE, "done")
        self.succession.end_loop(module, result)

    def leave(self) -> None:
        """All ranks have agreed to end; who goes is not replaced."""
        self.generations.store.set(PHASE, "done")

    def listens(self) -> None:
        """This rank can be asked to save (`planned_save`)."""
        self.generations.store.set(LISTENS.format(self.rank), str(self.born))

    def beside(self) -> TogetherBeside:
        """For something that all ranks do beside training, until the next generation begins. Called on each of them."""
        generation, store = self.recovery.generation, self._surroundings.connect()
        number = self._beside[1] + 1 if self._beside[0] == generation else 0
        self._beside = generation, number
        generations = Generations(store)

        def check() -> None:
            if generations.begun(generation + 1):
                raise Interrupted(f"generation {generation} is over")

        return TogetherBeside(store, f"beside/{generation}/{number}", self.rank, self.grid.world_size, check)

    def gasp(self) -> Gasp:
        """This rank's part in a last checkpoint; the run has been given up."""
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
        """Among those who are left: the supervisor has written down who is gone; else whoever comes is left."""
        topic, generations = f"gasp/{generation}", self.generations
        if not self._surroundings.supervised:
            return roll_call(generations, topic, self.rank, plain, generation, self.grid.world_size)
        lost = generations.lost(generation)
        left = [rank for rank in range(self.grid.world_size) if rank not in lost]
        timeout_s = self.options.rendezvous_timeout_s
        return generations.share(topic, self.rank, plain, generation, left, timeout_s, given_up=True)

    def told_to_end(self) -> None:
        """This process has got a SIGTERM; a supervisor keeps the time itself."""
        if self.options.gasp and not self._surroundings.supervised and self._deadline is None:
            self._deadline = threading.Timer(self.options.grace_s / 2, self._give_up)
            self._deadline.daemon = True
            self._deadline.start()

    def _give_up(self) -> None:
        """Half of the grace is over, and the ranks have not come to the end of a step."""
        generations, why = Generations(self._surroundings.connect()), "The launcher has ended this run."
        if generations.verdict() is None:
            generations.give_up(why, asked=True)
            generations.begin_next(0, Fault("end", (), why))

    def _close_at_exit(self) -> None:
        """From here on Ctrl-C, which a terminal sends to all ranks at once, has nothing left to end."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.close()

    def close(self) -> None:
        """Leaves the world."""
        atexit.unregister(self._close_at_exit)
        if self._deadline is not None:
            self._deadline.cancel()
        self.let_go()
        self._process_groups.close()
        if not self._surroundings.supervised:
            self._surroundings.leave(self.grid.world_size, failed=self.generations.verdict() is not None)

    def _wake(self) -> None:
        """The generation is over. Called in the monitor's thread: what the rank waits for ends, here and on the device.

        The device first: an aborted collective leaves anything in its tensors, and nothing must be made from that.
        A replacement that is on its way is left in peace: whatever it does there needs nobody.
        """
        if self.succession.journal.mode != "reading":
            self.device.stop()
        self._process_groups.abort()

    def let_go(self) -> None:
        """The run has ended, and an error will say so: that may still need the device, which nobody stops any more."""
        self.is_over = True
        self._monitor.stop()
        try:
            self.device.restart()
        except RuntimeError as error:
            log.warning("rank %d: its device cannot be used any more: %s", self.rank, error)

    def leave_without_device(self, why: str) -> NoReturn:
        """Ends this process at once, as whatever else it did might wait for its device; a new one takes its place."""
        log.error("rank %d: its device cannot be used any more: %s", self.rank, why)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(DEVICE_LOST)

    def end_when_told(self, told_to_end: Callable[[], bool]) -> None:
        """Has a recovery that waits in vain end when this process is told to; a supervisor needs no such thing."""
        if not self._surroundings.supervised:
            self.generations.patience = Patience(self.rank, told_to_end)

    def end_as_orphan(self) -> None:
        """The store is gone and with it every way to go on; ends at once. Called in the monitor's thread, mostly."""
        if not self._surroundings.supervised:
            if not self._armed:  # its rank has come to its end
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
    """This process's session: one, however many trainers and fits there are.

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
