"""Bucketed gradient reduction that overlaps backward."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_replica.core.points import reach
from lightning_replica.core.works import Check, Ordered, Work, wait
from lightning_replica.errors import ConfigurationError
from lightning_replica.groups.membership import Groups
from lightning_replica.sharding import collectives
from lightning_replica.sharding.buffers import Buffers
from lightning_replica.sharding.layout import Bucket
from lightning_replica.sharding.shared import SharedMemory

# Number of exchanges under way at a time; each has a receive buffer of a bucket's size.
_IN_FLIGHT = 4


@dataclass
class _Job:
    """One bucket whose reduction is not finished."""

    buffers: Buffers
    bucket: Bucket
    missing: int
    received: Tensor | None = None
    exchange: Work = None
    shares: list[Work] = field(default_factory=list)


class Reducer:
    """Averages gradients over the grid, bucket by bucket, as backward produces them.

    A bucket has two stages: ranks exchange its pieces and each adds up its own, then each sends the average to its
    peers. Every rank launches each stage strictly in the same order, so that collectives of one group match. The
    order is the reverse of registration, over all buffers of all optimizers that take part.

    Over shared memory nothing is sent, so nothing can be sent early: both stages are done in `finish`.

    Attributes:
        memory: The shared memory, if all ranks can read each other's memory; collectives then only signal when.
        private: Ids of buffers with gradients that have not been reduced.
        pool: Buffers for what other ranks send, kept so that steps need not allocate them.
    """

    def __init__(self) -> None:
        self._hooks: dict[int, list[Any]] = {}
        self.pool: list[Tensor] = []
        self.memory: SharedMemory | None = None
        self.private: set[int] = set()
        self.reset()

    def add(self, buffers: Buffers) -> None:
        """Watch the gradients of ``buffers``, also those of parameters that are frozen for now."""
        self._hooks[id(buffers)] = handles = []
        for index, parameter in enumerate(buffers.parameters):
            trained = parameter.requires_grad
            parameter.requires_grad_(True)  # torch takes the hook only then; the parameter may be trained again
            handles.append(parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, buffers, index)))
            parameter.requires_grad_(trained)

    def remove(self, buffers: Buffers) -> None:
        """Remove the hooks from the parameters of ``buffers``."""
        self.private.discard(id(buffers))
        for handle in self._hooks.pop(id(buffers)):
            handle.remove()

    def connect(self, groups: Groups, check: Check) -> None:
        """Use ``groups`` from now on, and forget what was under way on other groups."""
        self._groups, self._check = groups, check
        self.memory = None
        self.reset()

    def reset(self) -> None:
        """Forget the step's launches, with the receive buffers that an unfinished exchange may still write into."""
        self._jobs: list[_Job] = []
        self._job_of: dict[tuple[int, int], _Job] = {}
        self._launched = self._shared = 0
        self._active = False

    def begin(self, active: Sequence[Buffers]) -> None:
        """Prepare for the last backward pass of a window, which sends the buckets of ``active`` as they fill."""
        self.reset()
        jobs = [
            _Job(buffers, bucket, len(bucket.parameters)) for buffers in active for bucket in buffers.layout.buckets
        ]
        self._jobs = sorted(jobs, key=lambda job: -max(job.buffers.order[index] for index in job.bucket.parameters))
        for job in self._jobs:
            self._job_of.update(((id(job.buffers), index), job) for index in job.bucket.parameters)
        self._active = True

    def finish(self, active: Sequence[Buffers]) -> None:
        """Wait until the shard's pieces of ``grads`` hold the averaged gradient.

        Buckets that backward did not complete (unused parameters) are launched as they are.

        Raises:
            CollectiveError: If a peer is gone.
        """
        if not self._active:  # `begin` was not called before backward: reduce what there is
            self.begin(active)
        if self.memory is not None:
            self._read(self.memory)
        while self.memory is None and self._shared < len(self._jobs):
            if self._can_launch():
                self._launch()
            else:
                self._share()
        for job in self._jobs:
            for work in job.shares:
                wait(work, self._check)
            self.private.discard(id(job.buffers))
        self.reset()

    def gather_gradients(self, active: Sequence[Buffers]) -> None:
        """Make all of ``grads`` the averaged gradient, as under DDP. Called after `finish`."""
        if self.memory is not None:
            self.memory.fence()
            grid, holders = self._groups.grid, self._groups.grid.replica_places(self._groups.rank)
            for buffers in active:
                for bucket in buffers.layout.buckets:
                    self.memory.take_averages(
                        buffers.block, bucket, range(grid.size), lambda place: holders[grid.shard_at(place)]
                    )
            return
        works = [
            work
            for buffers in active
            for bucket in buffers.layout.buckets
            for work in collectives.gather(bucket, buffers.grads, self._groups)
        ]
        for work in works:
            wait(work, self._check)

    def _on_gradient(self, buffers: Buffers, index: int, _: Tensor) -> None:
        """Launch what can be launched, now that a parameter has its complete gradient. Called by autograd."""
        job = self._job_of.get((id(buffers), index))
        buffers.attach(index)
        if job is None:
            self.private.add(id(buffers))
            return
        if job.received is not None:
            raise ConfigurationError(
                "A parameter got a second gradient in one backward pass, after its bucket had been sent. Reentrant"
                " activation checkpointing does that to shared parameters: use `checkpoint(..., use_reentrant=False)`."
            )
        job.missing -= 1
        while self._can_launch() and self._jobs[self._launched].missing <= 0:
            self._launch()
        while self._shared < self._launched and _is_done(self._jobs[self._shared].exchange):
            self._share()

    def _read(self, memory: SharedMemory) -> None:
        """Reduce over shared memory."""
        for job in self._jobs:
            job.buffers.complete(job.bucket)
        memory.fence()
        for number, job in enumerate(self._jobs):
            memory.average(job.buffers.block, job.bucket)
            if number == 0:
                reach("reduction")
        memory.fence()
        for job in self._jobs:
            peers = self._groups.grid.places_of(self._groups.shard)
            memory.take_averages(job.buffers.block, job.bucket, peers, lambda place: place)

    def _can_launch(self) -> bool:
        return self.memory is None and self._launched < len(self._jobs) and self._launched - self._shared < _IN_FLIGHT

    def _launch(self) -> None:
        job = self._jobs[self._launched]
        job.buffers.complete(job.bucket)
        job.received = self._receive_buffer(job)
        room = job.received[: job.bucket.pieces[self._groups.place].numel * self._groups.grid.size]
        job.exchange = collectives.exchange(job.bucket, job.buffers.grads, room, self._groups)
        self._launched += 1

    def _share(self) -> None:
        job = self._jobs[self._shared]
        wait(job.exchange, self._check)
        grads, received = job.buffers.grads, job.received
        if received is not None:
            collectives.sum_pieces(job.bucket, received, grads, self._groups)
            self.pool = [*self.pool, received][-_IN_FLIGHT:]
        job.shares = collectives.share_with_peers(job.bucket, grads, self._groups)
        self._shared += 1
        if self._shared == 1:
            reach("reduction")

    def _receive_buffer(self, job: _Job) -> Tensor:
        """Return a buffer for any bucket of the job's flat buffer, so that `_IN_FLIGHT` of them serve all buckets."""
        grads = job.buffers.grads
        largest = self._groups.grid.size * job.buffers.largest_piece
        for place, free in enumerate(self.pool):
            if free.dtype == grads.dtype and free.numel() >= largest:
                return self.pool.pop(place)
        return torch.empty(largest, dtype=grads.dtype, device=grads.device)


def _is_done(work: Work) -> bool:
    """Return whether what follows ``work`` can be launched without waiting for it."""
    return work is None or isinstance(work, Ordered) or work.is_completed()
