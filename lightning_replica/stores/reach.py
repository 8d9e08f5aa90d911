"""Opens connections to stores, by their addresses."""

from typing import TYPE_CHECKING

import torch.distributed as dist

from lightning_replica.errors import ConfigurationError
from lightning_replica.stores.address import Address, EtcdAddress
from lightning_replica.stores.part import part_of
from lightning_replica.stores.tagged import with_tags
from lightning_replica.stores.tcp import reach as reach_tcp

if TYPE_CHECKING:
    from lightning_replica.stores.etcd import EtcdStore


def reach(address: Address) -> dist.Store:
    """Open a connection to the run's part of a store, with tags if there is a secret. Fail if no process serves it.

    A connection to etcd is opened by the first request.

    Raises:
        ConnectionRefusedError: If no process serves it any more.
        OSError: If its host cannot be reached.
        DistNetworkError: If the process that listens there serves no store.
        ConfigurationError: If the package with which etcd is reached is not installed.
    """
    whole: dist.Store
    whole = _etcd(address) if isinstance(address, EtcdAddress) else reach_tcp(address.host, address.port)
    return with_tags(part_of(whole, address.prefix), address.prefix)


def forget(address: Address, prefix: str) -> None:
    """Delete what an earlier run has left under a prefix of a whole store that is never restarted; else do nothing."""
    if isinstance(address, EtcdAddress):
        _etcd(address).forget(f"{prefix}/")


def _etcd(address: EtcdAddress) -> "EtcdStore":
    try:
        from lightning_replica.stores.etcd import EtcdStore
    except ImportError as error:
        raise ConfigurationError(
            f"A store on etcd needs the extra `etcd`: {error}. Install it with `pip install 'lightning-replica[etcd]'`."
        ) from error
    return EtcdStore(address)
