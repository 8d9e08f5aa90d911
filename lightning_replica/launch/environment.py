"""What the supervisor passes to a rank that it starts.

| variable | meaning |
|---|---|
| LIGHTNING_REPLICA_STORE | ``host:port`` of the run's store, and the prefix of the run's keys |
| LIGHTNING_REPLICA_NODE_STORE | the same of the store of this node's supervisor, if there are several nodes |
| LIGHTNING_REPLICA_SUPERVISOR | process id of the supervisor |
| LIGHTNING_REPLICA_GENERATION | generation in which the process is started; above 0 it is a replacement |
| LIGHTNING_REPLICA_RANK | the rank |
| LIGHTNING_REPLICA_WORLD_SIZE | number of ranks; Lightning removes WORLD_SIZE after a fit |
| LIGHTNING_REPLICA_SPOOL | directory for large results that set-up collectives gave ranks (control/journal.py) |
| LIGHTNING_REPLICA_BEACONS | where the rank finds the memory that it writes its progress to (beacons.py) |

GLIBC_TUNABLES turns the caches of malloc's threads off, unless the user has set them (see `allocator`).

LOCAL_RANK, NODE_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set as Lightning's own launcher sets them. Under
`lightning-replica run`, RANK is set too, as torchrun sets it.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from lightning_replica.control import keys
from lightning_replica.control.gathering import LocalRanks
from lightning_replica.control.journal import SPOOL
from lightning_replica.errors import ConfigurationError
from lightning_replica.launch.node_context import NodeContext
from lightning_replica.stores.address import Address, parse
from lightning_replica.stores.reach import reach
from lightning_replica.stores.shared import SharedStore
from lightning_replica.stores.tcp import connect

_STORE = "LIGHTNING_REPLICA_STORE"
_NODE_STORE = "LIGHTNING_REPLICA_NODE_STORE"
_SUPERVISOR = "LIGHTNING_REPLICA_SUPERVISOR"
_GENERATION = "LIGHTNING_REPLICA_GENERATION"
_RANK = "LIGHTNING_REPLICA_RANK"
_WORLD_SIZE = "LIGHTNING_REPLICA_WORLD_SIZE"
_DOUBLES_UP = "LIGHTNING_REPLICA_DOUBLES_UP"
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_TUNABLES = "GLIBC_TUNABLES"
_HASH_SEED = "PYTHONHASHSEED"
_TCACHE = "glibc.malloc.tcache_count"


class RankContext(Protocol):
    """How a rank reaches the other ranks, under any launcher."""

    @property
    def generation(self) -> int:
        """The generation in which the process is started."""

    @property
    def spool(self) -> Path | None:
        """The directory for large results of set-up collectives; None if no process will read them."""

    @property
    def shares_spool(self) -> bool:
        """Whether every process that may replace this rank can read the spool; not so on several nodes."""

    @property
    def doubles_up(self) -> bool:
        """Whether a node may run the ranks of several, which then share its devices."""

    @property
    def supervised(self) -> bool:
        """Whether a supervisor replaces lost ranks. If not, the launcher ends all ranks together."""

    def connect(self) -> dist.Store:
        """Open a new connection to the store."""

    def local_ranks(self) -> LocalRanks | None:
        """Open a new connection to the store of this node's ranks; None if each rank reads the store of the run."""

    def near(self) -> dist.Store:
        """Open a new connection to the store in which this process reads the log of generations."""

    def leave(self, world_size: int, failed: bool) -> None:
        """Leave the run. This is the last thing that a rank does."""


@dataclass(frozen=True)
class RankEnvironment:
    """The context of a rank that a supervisor has started.

    Attributes:
        store: Where the store of the run is.
        supervisor: Process id of the supervisor.
        generation: Generation in which the process is started.
        spool: See `RankContext.spool`.
        node_store: Where this node's supervisor leaves messages for its ranks, if there are several nodes.
        local_world_size: Number of ranks on a node.
        doubles_up: See `RankContext.doubles_up`.
    """

    store: Address
    supervisor: int
    generation: int
    spool: Path | None = None
    node_store: Address | None = None
    local_world_size: int = 1
    doubles_up: bool = False
    supervised = True

    @classmethod
    def current(cls) -> "RankEnvironment | None":
        """Return the environment of this process; None if no supervisor started it.

        Raises:
            ConfigurationError: If the variables are not as a supervisor sets them.
        """
        if _STORE not in os.environ:
            return None
        try:
            store, generation = parse(os.environ[_STORE]), int(os.environ[_GENERATION])
            spool = Path(os.environ[SPOOL]) if SPOOL in os.environ else None
            node_store = parse(os.environ[_NODE_STORE]) if _NODE_STORE in os.environ else None
            local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            doubles_up = _DOUBLES_UP in os.environ
            return cls(store, int(os.environ[_SUPERVISOR]), generation, spool, node_store, local_world_size, doubles_up)
        except (KeyError, ValueError) as error:
            given = ", ".join(f"{name}={os.environ.get(name)!r}" for name in (_STORE, _SUPERVISOR, _GENERATION))
            raise ConfigurationError(
                f"{given}: the supervisor sets these for its ranks, but not to these values. Unset all variables that"
                " begin with LIGHTNING_REPLICA_, and start the script again."
            ) from error

    @property
    def shares_spool(self) -> bool:
        """See `RankContext.shares_spool`."""
        return self.node_store is None

    def connect(self) -> dist.Store:
        """Open a new connection to the store of the run."""
        if self.node_store is None:
            return connect(self.store.host, self.store.port)
        return SharedStore(self.store, self._failover)

    def local_ranks(self) -> LocalRanks | None:
        """Open a new connection to the store of this node's ranks. See `RankContext.local_ranks`."""
        if self.node_store is None:
            return None
        address = self.node_store
        return LocalRanks(reach(address), self.local_world_size, lambda: (self.connect(), reach(address)))

    def near(self) -> dist.Store:
        """Open a new connection to the store in which this process reads the log of generations."""
        return self.connect() if self.node_store is None else reach(self.node_store)

    def _failover(self, number: int) -> Address:
        """Wait for what this node's supervisor says about a lost store. If it says nothing, it ends this process."""
        if self.node_store is None:
            raise RuntimeError("the supervisor's own store is gone")
        return parse(reach(self.node_store).get(keys.failover(number)).decode())

    def leave(self, world_size: int, failed: bool) -> None:
        """Do nothing: the supervisor waits for its children."""

    def variables(self, rank: int, context: NodeContext, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the complete environment for the process of ``rank``."""
        return {
            **interface(context.interface),
            **inherited,
            **allocator(inherited),
            **hash_seed(inherited),
            _STORE: str(self.store),
            **({} if self.node_store is None else {_NODE_STORE: str(self.node_store)}),
            _SUPERVISOR: str(self.supervisor),
            _GENERATION: str(self.generation),
            _RANK: str(rank),
            _WORLD_SIZE: str(context.world_size),
            **({} if self.spool is None else {SPOOL: str(self.spool)}),
            **({_DOUBLES_UP: "1"} if self.doubles_up else {}),
            **({} if self.node_store is None else {"RANK": str(rank)}),  # as torchrun does
            "LOCAL_RANK": str(context.local_rank(rank)),
            "LOCAL_WORLD_SIZE": str(context.local_world_size),
            "NODE_RANK": str(context.node_rank(rank)),
            "WORLD_SIZE": str(context.world_size),
            "MASTER_ADDR": self.store.host,
            "MASTER_PORT": str(self.store.port),
        }


def ranks_running() -> str:
    """Return how many ranks the supervisor has started, as text; empty if there is no supervisor."""
    return os.environ.get(_WORLD_SIZE, "")


def rank_here() -> int:
    """Return the rank of this process, which a supervisor has started."""
    return int(os.environ[_RANK])


def interface(name: str) -> dict[str, str]:
    """Return the variable that keeps gloo's sockets on an interface. A value that the user has set takes precedence."""
    return {_GLOO_INTERFACE: name} if name else {}


def hash_seed(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variable with which sets of strings have the same order in all processes, replacements included.

    Python reads it only when a process starts. The user's own choice takes precedence.
    """
    return {} if inherited.get(_HASH_SEED) else {_HASH_SEED: "0"}


def allocator(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variable with which a process can use the memory of freed gradients again.

    torch asks glibc for aligned memory. What is left over in front of a large gradient is small, goes into the cache of
    a thread (tcache) and stays there, so the hole that the gradient leaves is too short for the next one of its size.
    Without tcache the two are joined. glibc reads the variable only when a process starts. docs/decisions.md has
    figures. Settings of the user's take precedence.
    """
    given = inherited.get(_TUNABLES, "")
    if _TCACHE in given:
        return {}
    return {_TUNABLES: ":".join(filter(None, (given, f"{_TCACHE}=0")))}
