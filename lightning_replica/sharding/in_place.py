"""Values that are updated where they lie, for steps that are never undone."""

from collections.abc import Sequence

from torch import Tensor

from lightning_replica.core.pending_work import Check
from lightning_replica.groups.membership import Groups
from lightning_replica.sharding.gathering import gather
from lightning_replica.sharding.shared import SharedMemory
from lightning_replica.sharding.values import Values, part_of


class InPlace(Values):
    """Flat values of which the shard is one range of ``params``, and ``main`` is that range, unless it has more bits.

    So a step needs no second copy of the shard, and need not ask whether user code has written to the first. The grid
    must be that of one replica, and buckets so large that there is one.

    The arguments and attributes are those of `values.Values`.
    """

    shares_params = True

    def _main_numels(self, has_more_bits: bool) -> tuple[int, ...]:
        return super()._main_numels(has_more_bits) if has_more_bits else (0,) * self.layout.grid.shards

    def _main(self) -> Tensor:
        (bucket,) = self.layout.buckets
        return super()._main() if self._is_separate() else part_of(self.params, bucket.pieces[self._place])

    def _is_separate(self) -> bool:
        return self.block.main.dtype != self.params.dtype

    def is_params(self) -> bool:
        """Return whether the parameters hold the shard's values; always so where these lie there."""
        return not self._is_separate() or super().is_params()

    def main_from_params(self) -> None:
        """Take the shard's values from the parameters, but keep 32-bit values that round to the 16-bit parameters."""
        if self._is_separate():
            super().main_from_params()

    def params_from_main(self) -> None:
        """Copy the shard's values into the parameters, before they are gathered."""
        if self._is_separate():
            super().params_from_main()


def gather_in_place(active: Sequence[InPlace], groups: Groups, check: Check, memory: SharedMemory | None) -> None:
    """Fill ``params`` of every buffer from the ranks of this replica, each of which has updated its part. Collective.

    Args:
        active: The buffers.
        groups: The process groups.
        check: Raises when waiting has become pointless.
        memory: The shared memory, if the ranks of this node can read each other's memory.
    """
    for values in active:
        values.params_from_main()
    if groups.grid.shards == 1:
        return
    if memory is None:
        gather([(bucket, values.params) for values in active for bucket in values.layout.buckets], groups, check)
        return
    memory.fence()
    holders = [groups.grid.local_of(rank) for rank in groups.grid.replica_ranks(groups.rank)]
    for values in active:
        for bucket in values.layout.buckets:
            for holder, piece in zip(holders, bucket.pieces, strict=True):
                memory.take("params", values.block, piece, holder)
    memory.fence()  # user code may write to the parameters from now on
