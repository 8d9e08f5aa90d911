"""The endpoint of a run: which node serves the store, and under which address this node is seen."""

import errno
import socket
import time
from collections.abc import Callable
from typing import Final

import psutil
import torch.distributed as dist

from lightning_replica.core.limited import within
from lightning_replica.core.messages import say
from lightning_replica.errors import ConfigurationError
from lightning_replica.nodes.node_settings import NodeSettings
from lightning_replica.stores.address import Address, EtcdAddress, StoreAddress
from lightning_replica.stores.reach import reach
from lightning_replica.stores.tcp import serve

_ADVICE: Final = "Give the address or the name of one of the nodes, as HOST:PORT, to --rdzv-endpoint on all nodes."
_TRY_S: Final = 5.0  # for one connection
_ANSWER_S: Final = 10.0
_PAUSE_S: Final = 0.2
_QUIET_S: Final = 5.0  # before this node tells that it waits for the store


def serve_or_wait(settings: NodeSettings) -> dist.TCPStore | None:
    """Serve the store if its host is this node, and return it; else wait until it is served, and return None.

    Raises:
        ConfigurationError: If no process serves the store, or its host has no address that other nodes can reach.
    """
    if isinstance(settings.store, EtcdAddress):
        _wait(
            settings,
            _ask,
            "Check that a majority of its members runs, and that their ports are open to this node.",
        )
        return None
    served = _serve(settings.store, settings.join_timeout_s)
    if served is None:
        advice = (
            "Check that the node with this address runs the same command, that its port is open to this node, and that"
            " no other service has it."
        )
        _wait(settings, _connect, advice)
    return served


def _serve(store: StoreAddress, timeout_s: float) -> dist.TCPStore | None:
    """Serve the store if its host is this node and no other process of this node serves it."""
    address = _resolve(store.host, timeout_s)
    if address.startswith("127.") and store.host not in (address, "localhost"):
        raise ConfigurationError(f"{store.host!r} is {address} here, which no other node can reach. {_ADVICE}")
    if address not in own_addresses():
        return None
    try:
        return serve(address, store.port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:  # another process of this node serves it
            return None
        raise ConfigurationError(f"This node cannot serve the store at {store.endpoint}: {error}. {_ADVICE}") from error


def _resolve(host: str, timeout_s: float) -> str:
    """Return the IP address of a host. Its name may be unknown for some time, as names of new pods are."""
    began, said = time.monotonic(), False
    while True:
        try:
            return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            if time.monotonic() - began > timeout_s:
                raise ConfigurationError(
                    f"The host {host!r} of the store has not been known for {timeout_s:g} s: {error}. {_ADVICE}"
                ) from error
            if time.monotonic() - began > _QUIET_S and not said:
                said = True
                say(f"waiting for the name of the host {host!r} to be known ({error}), for up to {timeout_s:g} s.")
        time.sleep(_PAUSE_S)


def _connect(store: Address) -> None:
    """Ask the store. What listens there may be another service, for whose answer torch would wait without end."""
    socket.create_connection((store.host, store.port), _TRY_S).close()
    try:
        within(_ANSWER_S, lambda: _ask(store))
    except TimeoutError as error:
        raise TimeoutError(f"what listens there has not answered as a store: {error}") from error


def _ask(store: Address) -> None:
    reach(store).check([""])


def _wait(settings: NodeSettings, try_: Callable[[Address], None], advice: str) -> None:
    """Wait until the store answers: nodes may be started in any order."""
    where, began, said = settings.store.endpoint, time.monotonic(), False
    while True:
        try:
            try_(settings.store)
            return
        except (OSError, dist.DistError) as error:
            waited_s = time.monotonic() - began
            if waited_s > settings.join_timeout_s:
                raise ConfigurationError(
                    f"No process has served a store at {where} for {settings.join_timeout_s:g} s: {error}. {advice}"
                ) from error
            if waited_s > _QUIET_S and not said:
                said = True
                say(f"waiting for the store at {where}, which does not answer yet ({error}).")
        time.sleep(_PAUSE_S)


def own_addresses() -> frozenset[str]:
    """Return the IP addresses of this node."""
    return frozenset(each.address for found in psutil.net_if_addrs().values() for each in found)


def interface_of(address: str) -> str:
    """Return the name of the network interface that has an address; empty if none has."""
    found = [name for name, all_ in psutil.net_if_addrs().items() if any(each.address == address for each in all_)]
    return found[0] if found else ""


def address_towards(store: Address, timeout_s: float) -> str:
    """Return the address with which this node reaches the store. Sends nothing.

    A member of etcd may be on this node, at a loopback address. Then another member tells.

    Args:
        store: Where the store is.
        timeout_s: How long to wait until its name is known, in seconds.

    Raises:
        ConfigurationError: If it is not.
    """
    endpoints = store.endpoints if isinstance(store, EtcdAddress) else ((store.host, store.port),)
    found = [_address_towards(_resolve(host, timeout_s), port) for host, port in endpoints]
    return next((address for address in found if not address.startswith("127.")), found[0])


def _address_towards(address: str, port: int) -> str:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        return str(probe.getsockname()[0])
