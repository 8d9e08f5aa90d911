"""Bucketed gradient reduction that overlaps backward."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from lightning_replica.points import reach
from lightning_replica.sharding import collectives
from lightning_replica.sharding.buffers import Buffers
from lightning_replica.sharding.collectives import Groups
from lightning_replica.works import Check, Work, wait


class Reducer:
    """Averages gradients over the world, bucket by bucket, as backward produces them.

    Two stages a bucket: its pieces are exchanged and each rank adds up its own, then the sum goes to the peers.
    Each stage is launched strictly in order of bucket, on every rank, so that collectives of one group meet.
    """

    def __init__(self, buffers: Buffers, parameters: Sequence[nn.Parameter]) -> None:
        self._buffers = buffers
        self._buckets = buffers.layout.buckets
        bucket_of = {i: bucket.index for bucket in self._buckets for i in bucket.parameters}
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, bucket_of[index]))
            for index, parameter in enumerate(parameters)
        ]
        self._received = [buffers.grads.new_empty(bucket.world.numel) for bucket in self._buckets]
        self.enabled = True  # False while gradients accumulate: nothing is sent
        self.reset()

    def connect(self, groups: Groups, check: Check) -> None:
        """Uses ``groups`` from now on; whatever was under way on others is forgotten."""
        self._groups, self._check = groups, check
        self.reset()

    def reset(self) -> None:
        """Forgets the step's launches; the buffers stay."""
        self._missing = [len(bucket.parameters) for bucket in self._buckets]
        self._exchanges: list[Work] = []
        self._shares: list[list[Work]] = []

    def close(self) -> None:
        """Removes the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()

    def finish(self) -> None:
        """Waits until ``main_grads`` holds the shard's averaged gradient.

        Buckets that backward did not complete (unused parameters) are launched as they are.

        Raises:
            CollectiveError: If a peer is gone.
        """
        while len(self._exchanges) < len(self._buckets):
            self._exchange()
        for index in range(len(self._buckets)):
            wait(self._exchanges[index], self._check)
            if index == len(self._shares):
                self._share()
            if index == 0:
                reach("reduction")
        for works in self._shares:
            for work in works:
                wait(work, self._check)
        self.reset()

    def _on_gradient(self, bucket: int, _: Tensor) -> None:
        """Called by autograd once a parameter of ``bucket`` has its whole gradient."""
        if not self.enabled:
            return
        self._missing[bucket] -= 1
        while len(self._exchanges) < len(self._buckets) and self._missing[len(self._exchanges)] <= 0:
            self._exchange()
        while len(self._shares) < len(self._exchanges) and _is_done(self._exchanges[len(self._shares)]):
            wait(self._exchanges[len(self._shares)], self._check)
            self._share()

    def _exchange(self) -> None:
        bucket = self._buckets[len(self._exchanges)]
        received = self._received[bucket.index]
        self._exchanges.append(collectives.exchange(bucket, self._buffers.grads, received, self._groups))

    def _share(self) -> None:
        bucket = self._buckets[len(self._shares)]
        where = bucket.local(self._groups.replica_index)
        own = self._buffers.main_grads[where.start : where.stop]
        collectives.sum_pieces(bucket, self._received[bucket.index], own)
        own.div_(self._groups.grid.world_size)
        self._shares.append(collectives.share_with_peers(bucket, self._buffers.main_grads, self._groups))


def _is_done(work: Work) -> bool:
    return work is None or work.is_completed()
