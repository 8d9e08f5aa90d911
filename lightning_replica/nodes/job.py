"""A run on several nodes, as one of them sees it from start to end."""

import json
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch.distributed as dist

from lightning_replica._version import __version__
from lightning_replica.control import agreement, keys
from lightning_replica.core import runtime
from lightning_replica.core.messages import say
from lightning_replica.core.options import RecoveryOptions
from lightning_replica.errors import ConfigurationError
from lightning_replica.launch.node import start_script
from lightning_replica.launch.node_context import LOOPBACK, NodeContext
from lightning_replica.launch.rank_logs import RankLogs
from lightning_replica.launch.standby import Standbys
from lightning_replica.launch.supervisor import Supervisor
from lightning_replica.nodes import attempt
from lightning_replica.nodes.cluster import Cluster
from lightning_replica.nodes.endpoint import interface_of, serve_or_wait
from lightning_replica.nodes.failover import Stores
from lightning_replica.nodes.listener import Listener
from lightning_replica.nodes.meeting import join
from lightning_replica.nodes.membership import register
from lightning_replica.nodes.node_settings import NodeSettings
from lightning_replica.nodes.placement import ranks_of
from lightning_replica.stores.address import StoreAddress
from lightning_replica.stores.interface import Store
from lightning_replica.stores.reach import reach
from lightning_replica.stores.tcp import serve

_PAUSE_S: Final = 0.05


def run(settings: NodeSettings, command: Sequence[str], logs: RankLogs | None = None) -> int:
    """Run a training command on this node, together with the other nodes, and return the exit code.

    Args:
        settings: The nodes' settings.
        command: The command line of a rank.
        logs: Files for the ranks' output; None if it goes where this process's goes.

    Raises:
        ConfigurationError: If nobody serves the store, or too few nodes come.
    """
    served, node_store = serve_or_wait(settings), serve(LOOPBACK)
    address = replace(settings.store, prefix=attempt.enter(reach(settings.store), settings))
    stores = Stores(address)
    store, name = stores.connect(), socket.gethostname()
    compare(store, facts(settings, command), name)
    listener = Listener(settings.address)
    own = register(store, settings.address, listener.port, name)
    placement = join(store, own, settings)
    slots = placement.of(own.number)
    standbys = Standbys(lambda _: (command, None), 0, least=0 if slots else settings.nproc_per_node)
    supervisor = Supervisor(
        start_script(lambda _: (command, None)),
        settings.world_size,
        RecoveryOptions(),
        say,
        standbys=standbys,
        expects_facts=True,
        logs=logs,
    )
    cluster = Cluster(settings, stores, node_store, own, listener, placement, supervisor)
    context = NodeContext(
        world_size=settings.world_size,
        local_world_size=settings.nproc_per_node,
        store=address,
        node_store=StoreAddress(LOOPBACK, node_store.port),
        interface=interface_of(settings.address),
        node=own.name,
        doubles_up=settings.double_up_after_s is not None,
    )
    ranks = ranks_of(slots, settings.nproc_per_node)
    if ranks:
        say(f"node {own.name} has ranks {list(ranks)}.")  # a spare says that it waits once the others know of it
    code = supervisor.run_at(context, stores.connect, ranks, cluster)
    cluster.heartbeats.report_end(code)
    attempt.close(store)
    store.add(keys.NODES_LEFT, 1)
    if served or cluster.serves:
        _wait_for_all(store, cluster, settings)
    cluster.heartbeats.stop()
    return code if cluster.code is None else code or cluster.code  # a spare ends as the others do


def facts(settings: NodeSettings, command: Sequence[str]) -> dict[str, str]:
    """Return what all nodes of a run must have in common."""
    return {
        "--nnodes": str(settings.nnodes),
        "--nproc-per-node": str(settings.nproc_per_node),
        "--node-timeout": f"{settings.node_timeout_s:g}",
        "--double-up-after": str(settings.double_up_after_s),
        "the script and its arguments": " ".join(command[1:]),
        "the contents of the script": _contents(command),
        **agreement.versions(),
        "lightning_replica": __version__,
    }


def _contents(command: Sequence[str]) -> str:
    """Return a digest of a script in Python, so that a node with another one does not even become a spare."""
    scripts = [Path(each) for each in command[:2] if each.endswith(".py")]
    return runtime.digest_of(scripts[0]) if scripts else ""


def compare(store: Store, own: Mapping[str, str], name: str) -> None:
    """Check that this node was started like the one that came first. The others go on waiting for a node that was.

    Raises:
        ConfigurationError: If it was not; the message names the first difference.
    """
    first = json.loads(store.compare_set(keys.NODES_FACTS, "", json.dumps([name, dict(own)])))
    for what, value in own.items():
        theirs = first[1].get(what)
        if theirs != value:
            raise ConfigurationError(
                f"Nodes disagree on {what}: it is {value!r} on {name}, but {theirs!r} on {first[0]}, which came first."
                " Start the same command on all nodes. If these are two runs, give each its own --rdzv-endpoint."
            )


def training_command(script: str, arguments: Sequence[str], module: bool, no_python: bool = False) -> list[str]:
    """Return the command line of a rank."""
    if no_python:
        return [script, *arguments]
    return [sys.executable, *(["-m"] if module else []), script, *arguments]


def _wait_for_all(store: dist.Store, cluster: Cluster, settings: NodeSettings) -> None:
    """Serve the store until the other nodes have left."""
    deadline = time.monotonic() + settings.node_timeout_s
    while time.monotonic() < deadline:
        count = max(len(cluster.heartbeats.alive), 1 + store.add(keys.NODES_AGREE, 0))
        if store.add(keys.NODES_LEFT, 0) >= count:
            return
        time.sleep(_PAUSE_S)
