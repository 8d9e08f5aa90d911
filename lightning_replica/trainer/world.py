"""One process's connections to the other ranks: the store, the process groups, the monitor of generations."""

import logging
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_replica.checkpoint.barrier import StoreBarrier
from lightning_replica.control import departures, keys
from lightning_replica.control.gathering import Conclude, Gathering
from lightning_replica.control.generation import Generations
from lightning_replica.control.journal import Journal
from lightning_replica.control.monitor import Monitor
from lightning_replica.core.grids import Grids
from lightning_replica.core.options import RecoveryOptions
from lightning_replica.core.orphans import ORPHANED
from lightning_replica.core.pending_work import Ordered, Work, finish, wait
from lightning_replica.devices.interface import Device, is_separate
from lightning_replica.errors import CollectiveError, Interrupted
from lightning_replica.groups.membership import Groups, make_groups
from lightning_replica.groups.world import ProcessGroups
from lightning_replica.launch.environment import RankContext
from lightning_replica.launch.external import census

log = logging.getLogger(__name__)

# How often a busy rank checks whether the next generation has begun; without recovery, only whether the run has ended.
_LOOKS_S, _SELDOM_LOOKS_S = 0.5, 1.0


class World:
    """How this process talks to the other ranks, and how it stops talking when the generation ends.

    Args:
        grids: Which rank owns which shard.
        rank: This rank.
        rank_context: How this process reaches the other ranks.
        store: A connection of ``rank_context``.
        device: The device that this rank trains on.
        timeout_s: Time after which a collective fails on its own, in seconds.
        options: What the user has chosen about recovery.
        journal: Answers the collectives of a replacement that has not joined the other ranks yet.
        orphaned: Called in the monitor's thread when the store is gone.

    Attributes:
        grids: Which rank owns which shard.
        rank: This rank.
        size: Number of ranks.
        start_generation: The generation in which this process was started.
        device: The device that this rank trains on.
        generations: The log of generations.
        process_groups: All groups of this process.
        monitor: Watches for the next generation.
        is_over: Whether the run has ended before its time. Ranks no longer communicate then.
    """

    def __init__(
        self,
        grids: Grids,
        rank: int,
        rank_context: RankContext,
        store: dist.Store,
        device: Device,
        timeout_s: float,
        options: RecoveryOptions,
        journal: Journal,
        orphaned: Callable[[], None],
    ) -> None:
        self.grids, self.rank, self.size, self.device = grids, rank, grids.size, device
        self._rank_context, self._journal, self._patience_s = rank_context, journal, options.rendezvous_timeout_s
        self.start_generation = rank_context.generation
        gathering = Gathering(store, rank_context.local_ranks())
        self.generations = Generations(store, self.start_generation, gathering)
        self.process_groups = ProcessGroups(
            store, rank, self.size, device, timeout_s, self.check_now, journal, gathering
        )
        self._watched = Generations(rank_context.near())
        self.monitor = Monitor(self._watched, self._wake, orphaned, _LOOKS_S if options.recovery else _SELDOM_LOOKS_S)
        self.monitor.start(self.start_generation)
        self.is_over = False
        self._groups: Groups | None = None
        self._follower: Callable[[Groups], None] | None = None
        self._barriers = (-1, 0)  # generation, and number of the newest barrier in it

    def open(self) -> None:
        """Open the process groups. A replacement has only handles until it joins the other ranks."""
        if self.start_generation > 0:
            departures.come_back(self.generations.store, self.rank)
            self.process_groups.hold()
        else:
            self.process_groups.open(0, self.make_groups)

    def make_groups(self, timeout: timedelta) -> Iterable[dist.ProcessGroup]:
        """Make the package's own groups of a generation, and give them to the follower. Collective.

        Args:
            timeout: Time after which a collective fails while ranks connect.
        """
        first, *others = self.grids.grids_of(self.rank)
        self._groups = make_groups(first, self.rank, timeout, self.device.is_host, others)
        if self._follower is not None:
            self._follower(self._groups)
        return self._groups.all()

    def follow(self, connect: Callable[[Groups], None]) -> None:
        """Call ``connect`` with the groups of this generation and of every later one, in place of an earlier follower.

        In a replacement, the first call comes when it joins the other ranks.
        """
        self._follower = connect
        if self._groups is not None:
            connect(self._groups)

    @property
    def groups(self) -> Groups:
        """The process groups of this generation."""
        if self._groups is None:
            raise CollectiveError("This replacement has not joined the others yet; no collective is possible.")
        return self._groups

    def check(self) -> None:
        """Raise `Interrupted` if this rank's generation is known to be over."""
        self.monitor.check()

    def check_now(self) -> None:
        """Check like `check`, and have the monitor look at once. A waiting rank calls this again and again."""
        self.monitor.check_now()

    def wait(self, work: Work, tensor: Tensor | None = None) -> None:
        """Wait for a collective to end.

        Args:
            work: What an ``async_op=True`` collective returned.
            tensor: The tensor of the collective; None if it is in host memory.
        """
        if self._journal.mode == "reading":
            return  # the journal has answered; a replacement that has not joined yet ignores new generations
        if isinstance(work, dist.Work) and tensor is not None and is_separate(self.device, tensor):
            wait(Ordered(work), self.check_now)
            finish(self.check_now)
        else:
            wait(work, self.check_now)

    def meet(self, name: str) -> None:
        """Wait until all ranks have come to the meeting ``name`` in this generation."""
        everyone = range(self.size)
        self.generations.meet(name, self.rank, self.generations.current, everyone, self._patience_s)

    def conclude_last(self, generation: int, part: dict[str, Any], conclusion: Conclude) -> Any:
        """Draw a conclusion with the ranks that are left: by the supervisor's record, or else all ranks that come."""
        topic, generations = keys.gasping(generation), self.generations
        if not self._rank_context.supervised:
            return conclusion(census(generations, topic, self.rank, part, generation, self.size))
        lost = generations.lost(generation)
        left = [rank for rank in range(self.size) if rank not in lost]
        return generations.conclude(
            topic, self.rank, part, generation, left, self._patience_s, conclusion, given_up=True
        )

    def store_barrier(self) -> StoreBarrier:
        """Return a `StoreBarrier` for work beside training, until the next generation begins. Called on all ranks."""
        generation, store = self.generations.current, self._rank_context.connect()
        number = self._barriers[1] + 1 if self._barriers[0] == generation else 0
        self._barriers = generation, number
        generations = Generations(self._rank_context.near())

        def check() -> None:
            if generations.begun(generation + 1):
                raise Interrupted(f"generation {generation} is over")

        return StoreBarrier(store, keys.barrier(generation, number), self.rank, self.size, check)

    def let_go(self) -> None:
        """Stop the monitor and restart the device: the run has ended, and reporting its error may need the device."""
        self.is_over = True
        self.monitor.stop()
        try:
            self.device.restart()
        except RuntimeError as error:
            log.warning("rank %d: its device can no longer be used: %s", self.rank, error)

    def close(self) -> None:
        """Leave the world."""
        self.let_go()
        with suppress(OSError, dist.DistError):  # the store may be gone
            departures.leave(self.generations.store, self.rank)
        self.process_groups.close()
        self.generations.gathering.close()
        if not self._rank_context.supervised:
            self._rank_context.leave(self.size, failed=self.generations.verdict() is not None)

    def _wake(self) -> None:
        """End what this rank waits for, here and on the device: its generation is over. Called in the monitor's thread.

        The device is stopped first: an aborted collective leaves arbitrary data in its tensors, and nothing must be
        computed from that. A replacement that has not joined yet needs no other rank, so its device is not stopped. If
        the run is given up, it ends at once: it has nothing to save, and the others would wait for it.
        """
        if self._journal.mode != "reading":
            self.device.stop()
        elif self._watched.verdict() is not None:
            os._exit(ORPHANED)
        self.process_groups.abort()
