"""A run on several nodes, as one of them sees it from start to end."""

import socket
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

import psutil
import torch.distributed as dist

from lightning_replica.control import keys
from lightning_replica.core.messages import say
from lightning_replica.core.options import RecoveryOptions
from lightning_replica.errors import ConfigurationError
from lightning_replica.launch.environment import connect, serve
from lightning_replica.launch.node import start_script
from lightning_replica.launch.place import Place
from lightning_replica.launch.standby import Standbys
from lightning_replica.launch.supervisor import Supervisor
from lightning_replica.nodes.cluster import Cluster
from lightning_replica.nodes.membership import join, register
from lightning_replica.nodes.placement import ranks_of
from lightning_replica.nodes.pulse import listen
from lightning_replica.nodes.settings import NodeSettings


def run(settings: NodeSettings, command: Sequence[str]) -> int:
    """Run a training command on this node, together with the other nodes, and return the exit code.

    Args:
        settings: The nodes' settings.
        command: The command line of a rank.

    Raises:
        ConfigurationError: If nobody serves the store, or too few nodes come.
    """
    served, store = open_store(settings)
    listening = listen(settings.address)
    own = register(store, settings.address, listening.getsockname()[1], socket.gethostname())
    placement = join(store, own, settings)
    slots = placement.of(own.number)
    standbys = Standbys(lambda _: (command, None), 0, least=0 if slots else settings.nproc_per_node)
    supervisor = Supervisor(
        start_script(lambda _: (command, None)),
        settings.world_size,
        RecoveryOptions(),
        say,
        standbys=standbys,
        asks=True,
    )
    cluster = Cluster(settings, store, own, placement, lambda: supervisor)
    place = Place(
        settings.world_size,
        settings.nproc_per_node,
        settings.host,
        settings.port,
        interface_of(settings.address),
        own.name,
    )
    ranks = ranks_of(slots, settings.nproc_per_node)
    say(f"node {own.name} {f'has ranks {list(ranks)}' if ranks else 'waits as a spare'}.")
    code = supervisor.run_at(place, store, ranks, cluster)
    store.add(keys.NODES_LEFT, 1)
    if served:
        _wait_for_all(store, cluster, settings)
    cluster.pulse.stop()
    listening.close()
    return code


def open_store(settings: NodeSettings) -> tuple[bool, dist.Store]:
    """Serve the store if its host is this node; else connect to it. Return whether this process serves it, and it.

    Raises:
        ConfigurationError: If no process serves the store.
    """
    address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0][4][0]
    if address in own_addresses():
        try:
            return True, serve(str(address), settings.port)
        except OSError:  # another process of this node serves it
            pass
    try:
        store = dist.TCPStore(
            settings.host,
            settings.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=settings.join_timeout_s),
        )
    except dist.DistError as error:
        raise ConfigurationError(
            f"No store answers at {settings.host}:{settings.port}: {error}. Check that the node with this address runs"
            " the same command, and that the port is open between the nodes."
        ) from error
    del store
    return False, connect(settings.host, settings.port)


def own_addresses() -> frozenset[str]:
    """Return the IP addresses of this node."""
    return frozenset(each.address for found in psutil.net_if_addrs().values() for each in found)


def interface_of(address: str) -> str:
    """Return the name of the network interface that has an address; empty if none has."""
    found = [name for name, all_ in psutil.net_if_addrs().items() if any(each.address == address for each in all_)]
    return found[0] if found else ""


def address_towards(host: str, port: int) -> str:
    """Return the address with which this node reaches a host. Sends nothing."""
    family, kind, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def training_command(script: str, arguments: Sequence[str], module: bool) -> list[str]:
    """Return the command line of a rank."""
    return [sys.executable, *(["-m"] if module else []), script, *arguments]


def _wait_for_all(store: dist.Store, cluster: Cluster, settings: NodeSettings) -> None:
    """Serve the store until the other nodes have left."""
    deadline = time.monotonic() + settings.node_timeout_s
    while store.add(keys.NODES_LEFT, 0) < len(cluster.pulse.alive) and time.monotonic() < deadline:
        time.sleep(0.05)
