"""Bucketed gradient reduction that overlaps backward."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_replica.core.pending_work import Check
from lightning_replica.core.points import reach
from lightning_replica.errors import ConfigurationError
from lightning_replica.groups.membership import Groups
from lightning_replica.sharding.buffers import Buffers
from lightning_replica.sharding.levels import Job, Stage, stages_of
from lightning_replica.sharding.pipeline import Pipeline
from lightning_replica.sharding.shared import SharedMemory


class Reducer:
    """Averages gradients over the grid, bucket by bucket, as backward produces them.

    A bucket goes through the stages of `levels`: ranks exchange parts of it and add up their own, on each level, then
    each rank sends its average to its peers. Every rank begins each stage strictly in the same order of buckets, so
    that collectives of one group match. The order is the reverse of registration, over all buffers of all optimizers
    that take part.

    Where all ranks share memory nothing is sent, so nothing can be sent early: everything is done in `finish`.

    Args:
        reduce_dtype: The dtype in which gradients leave a node; None for their own.

    Attributes:
        private: Ids of buffers with gradients that have not been reduced.
        present: The number of ranks whose gradients sums are divided by; None for all.
    """

    def __init__(self, reduce_dtype: torch.dtype | None = None) -> None:
        self._reduce_dtype = reduce_dtype
        self._hooks: dict[int, list[Any]] = {}
        self._memory: SharedMemory | None = None
        self._stages: Sequence[Stage] = ()
        self._reads = False  # whether all ranks share memory, so that nothing is sent
        self.private: set[int] = set()
        self.present: int | None = None
        self.reset()

    @property
    def memory(self) -> SharedMemory | None:
        """The shared memory, if the ranks of this node can read each other's memory."""
        return self._memory

    @property
    def receive_buffers(self) -> list[Tensor]:
        """The buffers for what other ranks send."""
        return [room for stage in self._stages for room in stage.rooms]

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
        self.map(None)

    def map(self, memory: SharedMemory | None) -> None:
        """Use the shared memory from now on, or none."""
        self._memory, self._stages = memory, stages_of(self._groups, memory, self._reduce_dtype)
        self._reads = memory is not None and self._groups.grid.nodes == 1
        self.reset()

    def reset(self) -> None:
        """Forget the step's launches, with the receive buffers that an unfinished exchange may still write into."""
        self._jobs_of: dict[tuple[int, int], list[Job]] = {}
        self._pipeline: Pipeline | None = None

    def begin(self, active: Sequence[Buffers]) -> Pipeline:
        """Prepare for the last backward pass of a window, which sends the buckets of ``active`` as they fill."""
        self.reset()
        size = self._groups.grid.size
        present = (size if self.present is None else self.present, size)
        jobs = [
            Job(buffers, bucket, len(bucket.parameters), present)
            for buffers in active
            for bucket in buffers.layout.buckets
        ]
        jobs.sort(key=lambda job: -max(job.buffers.order[index] for index in job.bucket.parameters))
        for job in jobs:
            for index in job.bucket.parameters:
                self._jobs_of.setdefault((id(job.buffers), index), []).append(job)
        self._pipeline = Pipeline(jobs, self._stages, self._check)
        return self._pipeline

    def finish(self, active: Sequence[Buffers]) -> None:
        """Wait until the shard's pieces of ``grads`` hold the averaged gradient.

        Buckets that backward did not complete (unused parameters) are launched as they are.

        Raises:
            CollectiveError: If a peer is gone.
        """
        pipeline = self._pipeline or self.begin(active)  # without `begin` before backward: reduce what there is
        if self._reads and self._memory is not None:
            self._read(pipeline.jobs, self._memory)
        else:
            pipeline.finish()
        for job in pipeline.jobs:
            self.private.discard(id(job.buffers))
        self.reset()

    def _on_gradient(self, buffers: Buffers, index: int, _: Tensor) -> None:
        """Launch what can be launched, now that a parameter has its complete gradient. Called by autograd."""
        jobs = self._jobs_of.get((id(buffers), index))
        buffers.attach(index)
        if jobs is None:
            self.private.add(id(buffers))
            return
        if any(job.begun for job in jobs):
            raise ConfigurationError(
                "A parameter got a second gradient in one backward pass, after its bucket had been sent. Reentrant"
                " activation checkpointing does that to shared parameters: use `checkpoint(..., use_reentrant=False)`."
            )
        for job in jobs:
            job.missing -= 1
        if self._pipeline is not None and not self._reads:
            self._pipeline.advance()

    def _read(self, jobs: Sequence[Job], memory: SharedMemory) -> None:
        """Reduce over shared memory."""
        grid, place = self._groups.grid, self._groups.place
        for job in jobs:
            job.buffers.complete(job.bucket)
        memory.fence()
        for number, job in enumerate(jobs):
            memory.add_up(job.buffers.block, job.bucket.pieces[place], job.without_absent(grid.divisor))
            if number == 0:
                reach("reduction")
        memory.fence()
        for job in jobs:
            for peer in grid.places_of(self._groups.shard):
                memory.take("grads", job.buffers.block, job.bucket.pieces[peer], peer)
