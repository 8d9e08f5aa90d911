"""Ranks that torchrun, SLURM or another launcher has started. That launcher ends and restarts them all together.

So nobody replaces a single process. What needs no replacement (retry, repair) works as under our own supervisor. All
messages of ranks are in a store, under a prefix that names the job and the attempt. So a rank never reads a message of
another job, or of the same job before its restart.
"""

import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from lightning_replica._compat.lightning_names import (
    ClusterEnvironment,
    LightningEnvironment,
    _Launcher,
    _set_num_threads_if_needed,
)
from lightning_replica.control import keys
from lightning_replica.control.generation import Generations
from lightning_replica.core.descriptors import raise_limit
from lightning_replica.core.messages import say
from lightning_replica.errors import ConfigurationError, RecoveryError
from lightning_replica.launch.arguments import FillIn
from lightning_replica.launch.environment import RankEnvironment, interface
from lightning_replica.launch.node_context import LOOPBACK, loopback_interface
from lightning_replica.stores.part import part_of
from lightning_replica.stores.tcp import connect, serve

_LEAVE_S, _LEAVE_FAILED_S = 10.0, 1.0
_PATIENCE_S = 2.0
_MISSED_S = 15.0  # after which ranks that have not come are named
_SHOWN = 8
_NO_LAUNCHER = (
    "If no launcher has started this process, variables such as LOCAL_RANK, RANK and WORLD_SIZE are left over in its"
    " environment: unset them."
)
# The variables that distinguish one attempt from another, by launcher.
_ATTEMPT = (
    ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
)


def started_by_another(cluster: ClusterEnvironment | None) -> bool:
    """Return whether a launcher other than our supervisor has started this process, as Lightning detects it.

    Raises:
        ConfigurationError: If the variables that say where the ranks meet are missing.
    """
    if RankEnvironment.current() is not None or cluster is None or not cluster.creates_processes_externally:
        return False
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if isinstance(cluster, LightningEnvironment) and missing:
        raise ConfigurationError(
            f"LOCAL_RANK={os.environ['LOCAL_RANK']} is set, so another launcher has started this process, but"
            f" {' and '.join(missing)}, where its ranks would meet, {'is' if len(missing) == 1 else 'are'} not."
            " Unset LOCAL_RANK and run `python train.py`, which starts all ranks of one node, or use torchrun."
        )
    return True


class ExternalLauncher(_Launcher):
    """Starts no processes, as another launcher has started them.

    Args:
        cluster: Lightning's description of that launcher.
        num_processes: Number of ranks on this node.
        num_nodes: Number of nodes.
        fill_in: Completes the arguments of the launched function.
    """

    def __init__(self, cluster: ClusterEnvironment, num_processes: int, num_nodes: int, fill_in: FillIn) -> None:
        self._cluster, self._num_processes, self._num_nodes = cluster, num_processes, num_nodes
        self._fill_in = fill_in

    @property
    def is_interactive_compatible(self) -> bool:
        """Whether this works in a notebook: it does, as the processes exist already."""
        return True

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Call ``function`` with completed arguments, and return its result.

        Raises:
            ConfigurationError: If the launcher started another number of ranks.
        """
        world_size = self._num_processes * self._num_nodes
        try:
            self._cluster.validate_settings(num_devices=self._num_processes, num_nodes=self._num_nodes)
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        if self._cluster.world_size() != world_size:
            raise ConfigurationError(
                f"devices={self._num_processes} and num_nodes={self._num_nodes} make {world_size} ranks, but the"
                f" launcher started {self._cluster.world_size()}. Set `devices` to the processes on a node and"
                " `num_nodes` to the number of nodes."
            )
        _set_num_threads_if_needed(num_processes=self._num_processes)
        bound = self._fill_in(trainer, function, args, kwargs)
        return function(*bound.args, **bound.kwargs)

    def kill(self, signum: Any) -> None:
        """Do nothing. Lightning's signal handlers call this, and a rank has no children to end."""


@dataclass(frozen=True)
class ExternalEnvironment:
    """The context of a rank that another launcher has started.

    Attributes:
        address: Address at which the store listens.
        port: Its port.
        attempt: Name of the job and the attempt.
        served: The store itself, if this rank serves it.
    """

    address: str
    port: int
    attempt: str
    served: dist.TCPStore | None = None
    generation = 0
    spool = None
    shares_spool = True
    doubles_up = False
    supervised = False

    @classmethod
    def enter(cls, cluster: ClusterEnvironment, rank: int, num_nodes: int) -> "ExternalEnvironment":
        """Find the launcher's store; if it has none, serve a store on rank 0.

        Raises:
            ConfigurationError: If rank 0 cannot serve at the address, or this rank is already in this attempt.
        """
        raise_limit()
        attempt = _attempt(os.environ)
        if num_nodes == 1:
            for name, value in interface(loopback_interface()).items():
                os.environ.setdefault(name, value)
        host, port = cluster.main_address, cluster.main_port
        served = None
        if not _has_store():
            host = LOOPBACK if num_nodes == 1 else host
            served = _serve(host, port, num_nodes) if rank == 0 else None
        environment = cls(host, port, attempt, served)
        waits = _say_later(lambda: f"rank {rank} waits for rank 0 at {host}:{port}. {_NO_LAUNCHER}")
        try:
            store = environment.connect()
        finally:
            waits.cancel()
        if store.add(_here(rank), 1) > 1:
            raise ConfigurationError(
                f"Rank {rank} exists twice: its process was started again on its own, or two jobs meet at"
                f" {host}:{port}. Restart all ranks together, as `torchrun --max-restarts` does, or set another"
                " MASTER_PORT."
            )
        if rank == 0:
            _say_later(lambda: environment._who_is_missing(cluster.world_size()))
        return environment

    def _who_is_missing(self, world_size: int) -> str:
        store = self.connect()
        missing = [rank for rank in range(world_size) if not store.check([_here(rank)])]
        shown = ", ".join(map(str, missing[:_SHOWN])) + (", ..." if len(missing) > _SHOWN else "")
        return f"ranks {shown} have not come to {self.address}:{self.port} yet. {_NO_LAUNCHER}" if missing else ""

    def connect(self) -> dist.Store:
        """Open a new connection to the store."""
        return part_of(connect(self.address, self.port), f"lightning_replica/{self.attempt}")

    def local_ranks(self) -> None:
        """Return None: nobody leaves messages for the ranks of a node."""

    def near(self) -> dist.Store:
        """Open a new connection to the store."""
        return self.connect()

    def leave(self, world_size: int, failed: bool) -> None:
        """Leave the run, as the last thing that a rank does. A rank that serves the store waits for the others."""
        store = self.connect()
        store.add(keys.LEFT, 1)
        deadline = time.monotonic() + (_LEAVE_FAILED_S if failed else _LEAVE_S)
        while self.served is not None and store.add(keys.LEFT, 0) < world_size and time.monotonic() < deadline:
            time.sleep(0.01)


class Patience:
    """Limits a recovery's wait for ranks that nobody replaces. The recovery calls it while it waits.

    Args:
        rank: This rank.
        stop_requested: Returns whether this process has got SIGTERM, with which the launcher ends the rest of a run.
    """

    def __init__(self, rank: int, stop_requested: Callable[[], bool]) -> None:
        self._rank, self._stop_requested = rank, stop_requested
        self._said = False

    def __call__(self, waited_s: float, missing: Callable[[], list[int]]) -> None:
        """Tell the user once which ranks are lost, and fail when the launcher ends the run.

        Raises:
            RecoveryError: If this process has got SIGTERM while ranks are missing.
        """
        if waited_s < _PATIENCE_S:
            return
        gone = missing()
        if self._stop_requested() and gone:
            raise RecoveryError(f"The launcher has ended this run: only it can replace ranks {gone}, which are gone.")
        if not self._said and gone and self._rank == min(set(range(max(gone) + 2)) - set(gone)):
            self._said = True
            say(
                f"ranks {gone} have not come back for {waited_s:.0f} s. If their processes are gone, the launcher that"
                " started them must end and restart all ranks."
            )


def census(
    generations: Generations, topic: str, rank: int, plain: dict[str, Any], generation: int, world_size: int
) -> list[dict[str, Any]]:
    """Leave ``plain`` in the store, and return what all ranks that have come have left there.

    No process here knows which ranks are gone. The first rank to see that all have come, or that for some seconds no
    other rank has come, decides for all which ranks take part.

    Raises:
        RecoveryError: If this rank came too late.
        Interrupted: If a new generation begins meanwhile.
    """
    store = generations.store
    store.set(keys.share(topic, rank), json.dumps(plain))
    store.add(keys.come(topic), 1)
    last, arrived = time.monotonic(), 0

    def quiet() -> bool:
        nonlocal last, arrived
        come = store.add(keys.come(topic), 0)
        if come > arrived:
            last, arrived = time.monotonic(), come
        waited_s = time.monotonic() - last
        return arrived == world_size or waited_s > _PATIENCE_S or store.check([keys.present(topic)])

    generations.wait_for(quiet, generation, math.inf, "the surviving ranks", given_up=True)
    if not store.check([keys.present(topic)]):
        present = [each for each in range(world_size) if store.check([keys.share(topic, each)])]
        store.compare_set(keys.present(topic), "", json.dumps(present))
    decided: list[int] = json.loads(store.get(keys.present(topic)))
    if rank not in decided:
        raise RecoveryError(f"Rank {rank} came too late: ranks {decided} are writing the last checkpoint without it.")
    return [json.loads(each) for each in store.multi_get([keys.share(topic, each) for each in decided])]


def store_of_attempt(cluster: ClusterEnvironment) -> dist.Store | None:
    """Return the launcher's store, under a prefix that names the attempt; None if the launcher has none.

    torchrun keeps its store when it starts all ranks again, and torch's process groups have the same names in every
    attempt. So without the prefix, a rank may find the address of a process that is gone, and wait for it.
    """
    if not _has_store():
        return None
    return part_of(connect(cluster.main_address, cluster.main_port), f"lightning_replica/{_attempt(os.environ)}")


def _has_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _attempt(environment: Mapping[str, str]) -> str:
    for names in _ATTEMPT:
        if names[0] in environment:
            return "/".join(environment.get(name, "0") for name in names)
    return "0"


def _here(rank: int) -> str:
    """Return the key that counts the processes that are a rank. Written by that rank."""
    return f"here/{rank}"


def _say_later(text: Callable[[], str]) -> threading.Timer:
    """Say something when `_MISSED_S` seconds are over, if there is something to say then."""

    def speak() -> None:
        with suppress(Exception):  # the store may be gone by then, and this only informs
            if message := text():
                say(message)

    timer = threading.Timer(_MISSED_S, speak)
    timer.daemon = True
    timer.start()
    return timer


def _serve(host: str, port: int, num_nodes: int) -> dist.TCPStore:
    advice = "Set MASTER_ADDR to the address of rank 0's node and MASTER_PORT to a free port there."
    try:
        address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
        if num_nodes > 1 and address.startswith(("127.", "::1")):
            raise ConfigurationError(f"MASTER_ADDR={host} is {address}, which no other node can reach. {advice}")
        return serve(address, port)
    except OSError as error:
        raise ConfigurationError(f"Rank 0 cannot listen at {host}:{port}: {error}. {advice}") from error
