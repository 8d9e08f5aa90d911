"""Opens connections to stores, by their addresses."""

import torch.distributed as dist

from lightning_replica.stores.address import StoreAddress
from lightning_replica.stores.part import part_of
from lightning_replica.stores.tcp import reach as reach_tcp


def reach(address: StoreAddress) -> dist.Store:
    """Open a connection to the run's part of a store. Fail at once if no process serves it.

    Raises:
        ConnectionRefusedError: If no process serves it any more.
        OSError: If its host cannot be reached.
        DistNetworkError: If the process that listens there serves no store.
    """
    return part_of(reach_tcp(address.host, address.port), address.prefix)
