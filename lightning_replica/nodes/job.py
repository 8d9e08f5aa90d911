"""A run on several nodes, as one of them sees it from start to end."""

import json
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import psutil
import torch.distributed as dist

import lightning_replica
from lightning_replica.control import agreement, keys
from lightning_replica.core.messages import say
from lightning_replica.core.options import RecoveryOptions
from lightning_replica.errors import ConfigurationError
from lightning_replica.launch.node import start_script
from lightning_replica.launch.place import LOOPBACK, Place
from lightning_replica.launch.standby import Standbys
from lightning_replica.launch.supervisor import Supervisor
from lightning_replica.nodes import attempt
from lightning_replica.nodes.cluster import Cluster
from lightning_replica.nodes.door import Door
from lightning_replica.nodes.failover import Stores
from lightning_replica.nodes.membership import join, register
from lightning_replica.nodes.placement import ranks_of
from lightning_replica.nodes.settings import NodeSettings
from lightning_replica.stores.address import StoreAddress
from lightning_replica.stores.interface import Store
from lightning_replica.stores.reach import reach
from lightning_replica.stores.tcp import serve

_TRY_S: Final = 5.0  # for one connection
_PAUSE_S: Final = 0.2
_QUIET_S: Final = 5.0  # before this node tells that it waits for the store


def run(settings: NodeSettings, command: Sequence[str]) -> int:
    """Run a training command on this node, together with the other nodes, and return the exit code.

    Args:
        settings: The nodes' settings.
        command: The command line of a rank.

    Raises:
        ConfigurationError: If nobody serves the store, or too few nodes come.
    """
    served, node_store = serve_or_wait(settings), serve(LOOPBACK)
    address = replace(settings.store, prefix=attempt.enter(reach(settings.store), settings))
    stores = Stores(address)
    store, name = stores.connect(), socket.gethostname()
    compare(store, facts(settings, command), name)
    door = Door(settings.address)
    own = register(store, settings.address, door.port, name)
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
    cluster = Cluster(settings, stores, node_store, own, door, placement, supervisor)
    place = Place(
        world_size=settings.world_size,
        local_world_size=settings.nproc_per_node,
        store=address,
        node_store=StoreAddress(LOOPBACK, node_store.port),
        interface=interface_of(settings.address),
    )
    ranks = ranks_of(slots, settings.nproc_per_node)
    say(f"node {own.name} {f'has ranks {list(ranks)}' if ranks else 'waits as a spare'}.")
    code = supervisor.run_at(place, stores.connect, ranks, cluster)
    cluster.pulse.over(code)
    attempt.close(store)
    store.add(keys.NODES_LEFT, 1)
    if served or cluster.serves:
        _wait_for_all(store, cluster, settings)
    cluster.pulse.stop()
    return code if cluster.code is None else code or cluster.code  # a spare ends as the others do


def serve_or_wait(settings: NodeSettings) -> dist.TCPStore | None:
    """Serve the store if its host is this node, and return it; else wait until it is served, and return None.

    Raises:
        ConfigurationError: If no process serves the store, or its host has no address that other nodes can reach.
    """
    advice = "Give the address or the name of one of the nodes, as HOST:PORT, to --rdzv-endpoint on all nodes."
    try:
        address = str(socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigurationError(f"The host {settings.host!r} of the store is not known: {error}. {advice}") from error
    if address.startswith("127.") and settings.host not in (address, "localhost"):
        raise ConfigurationError(f"{settings.host!r} is {address} here, which no other node can reach. {advice}")
    if address in own_addresses():
        try:
            return serve(address, settings.port)
        except OSError:  # another process of this node serves it
            pass
    _wait_for_store(settings)
    return None


def _wait_for_store(settings: NodeSettings) -> None:
    """Wait until a process listens at the endpoint: nodes may be started in any order."""
    where, began, said = settings.store.endpoint, time.monotonic(), False
    while True:
        try:
            socket.create_connection((settings.host, settings.port), _TRY_S).close()
            return
        except OSError as error:
            waited_s = time.monotonic() - began
            if waited_s > settings.join_timeout_s:
                raise ConfigurationError(
                    f"No process has served a store at {where} for {settings.join_timeout_s:g} s: {error}. Check that"
                    " the node with this address runs the same command, and that its port is open to this node."
                ) from error
            if waited_s > _QUIET_S and not said:
                said = True
                say(f"waiting for the store at {where}, where no process listens yet ({error}).")
        time.sleep(_PAUSE_S)


def facts(settings: NodeSettings, command: Sequence[str]) -> dict[str, str]:
    """Return what all nodes of a run must have in common."""
    return {
        "--nnodes": str(settings.nnodes),
        "--nproc-per-node": str(settings.nproc_per_node),
        "--node-timeout": f"{settings.node_timeout_s:g}",
        "the script and its arguments": " ".join(command[1:]),
        **agreement.versions(),
        "lightning_replica": lightning_replica.__version__,
    }


def compare(store: Store, own: Mapping[str, str], name: str) -> None:
    """Check that this node was started like the one that came first. The others go on waiting for a node that was.

    Raises:
        ConfigurationError: If it was not; the message names the first difference.
    """
    first = json.loads(store.compare_set(keys.NODES_FACTS, "", json.dumps([name, dict(own)])))
    for what, value in own.items():
        there = first[1].get(what)
        if there != value:
            raise ConfigurationError(
                f"Nodes disagree on {what}: it is {value!r} on {name}, but {there!r} on {first[0]}, which came first."
                " Start the same command on all nodes. If these are two runs, give each its own --rdzv-endpoint."
            )


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
    while time.monotonic() < deadline:
        here = max(len(cluster.pulse.alive), 1 + store.add(keys.NODES_AGREE, 0))
        if store.add(keys.NODES_LEFT, 0) >= here:
            return
        time.sleep(0.05)
