"""One process's part in the run, from the start of the rank to its end."""

import atexit
import logging
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from lightning_replica._compat.cpython import mend_forks
from lightning_replica._compat.lightning_names import pl
from lightning_replica._compat.packages import chosen
from lightning_replica.control import agreement, keys, planned_save
from lightning_replica.control.gathering import Conclude
from lightning_replica.core import points, runtime
from lightning_replica.core.grids import Grids
from lightning_replica.core.options import RecoveryOptions
from lightning_replica.devices.interface import Device
from lightning_replica.errors import ConfigurationError, RecoveryError
from lightning_replica.groups.membership import Groups
from lightning_replica.launch import stacks
from lightning_replica.launch.beacons import VARIABLE, Beacon, HangLimits
from lightning_replica.launch.ending import Ending
from lightning_replica.launch.environment import RankContext
from lightning_replica.recovery.context import RecoveryContext
from lightning_replica.recovery.gasp import Gasp
from lightning_replica.recovery.mirror import Mirrors
from lightning_replica.recovery.recovery import Recovery
from lightning_replica.sharding.engine import Engine
from lightning_replica.state.structure import Outline
from lightning_replica.trainer.exits import Exits
from lightning_replica.trainer.handoff import Handoff
from lightning_replica.trainer.world import World

log = logging.getLogger(__name__)


class Session:
    """What one process has from its start to its end, whatever number of trainers and fits it runs.

    Args:
        grids: Which rank owns which shard.
        rank: This rank.
        rank_context: How this process reaches the other ranks.
        device: The device that this rank trains on.
        timeout_s: Time after which a collective fails on its own, in seconds.
        options: What the user has chosen about recovery.

    Attributes:
        options: What the user has chosen about recovery.
        rank: This rank.
        world: The connections to the other ranks.
        handoff: What this process leaves to a replacement, or has from its predecessor.
        exits: The ways in which this process ends before training is done.
        ending: Records how the run ends.
        fits: Number of fits that have begun.
        mirrors: The private parts of snapshots that peers keep for each other. Made by `attach`.
        recovery: Recovers from faults of the newest fit. Made by `attach`.
    """

    def __init__(
        self,
        grids: Grids,
        rank: int,
        rank_context: RankContext,
        device: Device,
        timeout_s: float,
        options: RecoveryOptions,
    ) -> None:
        self.rank, self.options, self.fits = rank, options, 0
        self._compared: dict[str, str] | None = None
        planned_save.ignore()
        if not mend_forks():
            log.warning("a worker of a DataLoader may hang in its fork in this version of Python: use a later one")
        is_replacement = rank_context.generation > 0
        _refuse_shared_devices(rank_context, device)
        self._show_progress(is_replacement)
        store = rank_context.connect()
        self.ending = Ending(store, grids.size, rank_context.supervised)
        self.handoff = Handoff(store, rank, grids.same_part(rank), rank_context, options)
        self.exits = Exits(rank, rank_context, options, lambda: self.handoff.armed)
        journal, orphaned = self.handoff.journal, self.exits.as_orphan
        self.world = World(grids, rank, rank_context, store, device, timeout_s, options, journal, orphaned)
        self._compare_worlds()
        self.world.open()
        atexit.register(self._close_at_exit)  # gloo's threads must end before the interpreter does

    @property
    def is_replacement(self) -> bool:
        """Whether this process is a replacement that has not joined the other ranks yet."""
        return self.handoff.is_replacement

    def _show_progress(self, is_replacement: bool) -> None:
        """Show this rank's progress and, on request, its stacks to the supervisor from now on."""
        limits = HangLimits.of(self.options)
        if VARIABLE in os.environ and self.options.recovery and not limits.off:
            path = os.environ[VARIABLE]
            try:
                points.watch(Beacon(path, self.rank, limits, stacks.answer(), is_replacement))
            except OSError as error:
                log.warning("rank %d: a hang will not be noticed: %s", self.rank, error)

    def _compare_worlds(self) -> None:
        """Check that all ranks agree, before any waits in a process group that a deviating rank would never join."""
        world = self.world
        facts = {
            "replicas": world.grids.replicas,
            **agreement.versions(),
            chosen().name: pl.__version__,
            **asdict(self.options),
            "_node": agreement.node(),
        }
        advice = "Start every rank from the same script, with the same options, in the same environment."
        timeout_s = self.options.rendezvous_timeout_s

        def together_of(everyone: list[dict[str, Any]]) -> list[str]:
            return list(world.grids.co_located([each["_node"] for each in everyone]))

        together = agreement.compare(
            world.generations, keys.WORLD, self.rank, world.size, facts, advice, timeout_s, together_of
        )
        if not together:
            world.generations.store.set(keys.SEPARATE, "")
        if together and self.rank == 0:
            log.warning(
                "Shards %s are held by several ranks of one node: losing that node loses them. Choose `replicas` so"
                " that the ranks of a replica, world_size / replicas, fill whole nodes.",
                ", ".join(together),
            )

    def compare_models(self, module: nn.Module) -> None:
        """Check that all ranks are about to train the same parameters."""
        topic, timeout_s = keys.model(self.fits), self.options.rendezvous_timeout_s
        agreement.compare_models(self.world.generations, topic, self.rank, self.world.grids, module, timeout_s)

    def agree(self, topic: str, own: dict[str, Any], conclude: Conclude) -> Any:
        """Return what one rank concludes from the parts of all; see `agreement.agree`."""
        timeout_s = self.options.rendezvous_timeout_s
        return agreement.agree(self.world.generations, topic, self.rank, self.world.size, own, timeout_s, conclude)

    def compare_runtimes(self) -> dict[str, str]:
        """Check that this rank runs what the run has begun with, on the same number of threads.

        Returns:
            Why a replacement may compute other bits than the rank that it replaces, by name.

        Raises:
            ConfigurationError: If the sources differ.
        """
        if self._compared is not None:
            return self._compared if self.is_replacement else {}
        world, timeout_s = self.world, self.options.rendezvous_timeout_s
        differ = agreement.compare_sources(
            world.generations,
            self.rank,
            world.size,
            runtime.sources(),
            timeout_s,
            may_differ=lambda name: name.startswith(runtime.NAMED),
        )
        own, threads = runtime.hardware(world.device.kind, world.device.is_host), torch.get_num_threads()
        began, began_threads = agreement.agree_on_hardware(
            world.generations, self.rank, world.size, own, threads, timeout_s
        )
        if threads != began_threads:
            torch.set_num_threads(began_threads)  # sums are cut by threads
        self._compared = {
            f"the {name} of rank {self.rank}": f"it was {began.get(name)!r} and is {own.get(name)!r} in this"
            " replacement, so last bits may differ from now on"
            for name in sorted({*began, *own})
            if began.get(name) != own.get(name)
        }
        if self.is_replacement:
            self._compared |= dict.fromkeys(differ, "it has other contents than when the run began")
        elif differ:
            log.warning("rank %d: %s has other contents than on rank 0.", self.rank, ", ".join(differ))
        return self._compared

    def attach(self, state: Engine, hook: Callable[[RecoveryContext], None] | None) -> None:
        """Begin a fit: ``state`` uses this session's groups, now and after every regroup.

        Args:
            state: The sharded state.
            hook: Called in every phase of a recovery; None if no callback has a hook.
        """
        self.fits += 1
        world = self.world
        mirrors = Mirrors(self.rank, world.wait)
        self.mirrors = mirrors
        self.recovery = Recovery(
            world.grids,
            self.rank,
            world.generations,
            world.process_groups,
            world.monitor,
            mirrors,
            world.make_groups,
            world.wait,
            self.options,
            hook,
        )

        def connect(groups: Groups) -> None:
            mirrors.connect(groups.peers, groups.grid.peers(groups.rank))
            state.connect(groups, world.check_now)

        world.follow(connect)

    def arm(self) -> None:
        """Begin a training loop. With recovery, a lost rank can be replaced from now on. Collective."""
        self.handoff.begin_loop(self.world.meet)

    def disarm(self, module: nn.Module, result: Callable[[], tuple[Outline, bytes, bytes]]) -> None:
        """End a training loop; ranks are no longer replaced after it. Collective. See `Handoff.end_loop`."""
        self.handoff.end_loop(self.world.meet, module, result)

    def gasp(self) -> Gasp:
        """Return this rank's part in the dying gasp. Called once the run has been given up."""
        world = self.world
        return Gasp(
            world.grids,
            self.rank,
            world.generations,
            world.process_groups,
            world.monitor,
            world.conclude_last,
            self.options.rendezvous_timeout_s,
        )

    def close(self) -> None:
        """Leave the world."""
        atexit.unregister(self._close_at_exit)
        self.exits.cancel()
        self.world.close()

    def _close_at_exit(self) -> None:
        """Close the session at exit. Ignore Ctrl-C, which a terminal sends to all ranks: it has nothing left to end."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.close()


_current: Session | None = None


def join(
    grids: Grids,
    rank: int,
    enter: Callable[[], RankContext],
    device: Device,
    timeout_s: float,
    options: RecoveryOptions,
) -> Session:
    """Return this process's session: there is one, however many trainers and fits there are.

    Raises:
        ConfigurationError: If the run has failed before, or an earlier trainer had another number of ranks.
        RecoveryError: If this process comes too late.
    """
    global _current
    is_first = _current is None
    if _current is None:
        _current = Session(grids, rank, enter(), device, timeout_s, options)
    world = _current.world
    verdict = world.generations.verdict()
    if verdict is not None and is_first:
        raise RecoveryError(f"The run was given up before this process had joined it. {verdict}")
    if verdict is not None:
        raise ConfigurationError(
            f"An earlier fit in this process has failed, and its world of ranks with it: {verdict}"
            " Start the script again: after an error, only a new process can train."
        )
    if world.grids != grids:
        raise ConfigurationError(
            f"An earlier trainer of this script ran with {world.grids}, but this one asks for {grids}."
            " Use the same `devices` and `replicas` in one script."
        )
    return _current


def _refuse_shared_devices(rank_context: RankContext, device: Device) -> None:
    if rank_context.doubles_up and not device.is_host:
        raise ConfigurationError(
            "--double-up-after works on CPUs only: ranks of two nodes would share a device, which"
            f" {device.backend!r} refuses. Leave the option out, and give more --spares."
        )
