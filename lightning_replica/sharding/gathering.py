"""The parameter gather: every rank receives all parameters from the shards of its replica."""

from collections.abc import Sequence

from lightning_replica.core.points import reach
from lightning_replica.core.works import Check, wait
from lightning_replica.groups.membership import Groups
from lightning_replica.sharding import collectives
from lightning_replica.sharding.buffers import Buffers
from lightning_replica.sharding.shared import SharedMemory


def gather_parameters(active: Sequence[Buffers], groups: Groups, check: Check, memory: SharedMemory | None) -> None:
    """Fill ``params`` of every buffer from ``main`` of all shards. Collective.

    Args:
        active: The buffers.
        groups: The process groups.
        check: Raises when waiting has become pointless.
        memory: The shared memory, if all ranks can read each other's memory.
    """
    if memory is not None:
        _read(active, memory)
    else:
        _receive(active, groups, check)


def _read(active: Sequence[Buffers], memory: SharedMemory) -> None:
    memory.fence()
    for number, (buffers, bucket) in enumerate([(b, bucket) for b in active for bucket in b.layout.buckets]):
        memory.gather(buffers.block, bucket, buffers.params)
        if number == 0:
            reach("gather")
    memory.release()


def _receive(active: Sequence[Buffers], groups: Groups, check: Check) -> None:
    works = []
    for buffers in active:
        buffers.params_from_main()
        works += [collectives.gather(bucket, buffers.params, groups) for bucket in buffers.layout.buckets]
    for number, bucket_works in enumerate(works):
        for work in bucket_works:
            wait(work, check)
        if number == 0:
            reach("gather")
