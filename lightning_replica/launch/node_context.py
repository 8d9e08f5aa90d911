"""Where a supervisor stands: which ranks it has, and where the store of the run is."""

import socket
from dataclasses import dataclass
from typing import Final

from lightning_replica.stores.address import Address, StoreAddress

LOOPBACK: Final = "127.0.0.1"
_LOOPBACKS: Final = ("lo", "lo0")  # Linux, macOS


@dataclass(frozen=True)
class NodeContext:
    """What a supervisor knows of the world around it.

    Attributes:
        world_size: Number of ranks on all nodes.
        local_world_size: Number of ranks on a node.
        store: The store that all processes of the run share.
        node_store: The store of this node's ranks and their supervisor; None if it is the same.
        node: Name of this node, if there are several; else empty.
        doubles_up: Whether a node may run the ranks of several.
        interface: Name of the network interface for traffic between ranks; empty to leave the choice to gloo.
    """

    world_size: int
    local_world_size: int
    store: Address
    node_store: StoreAddress | None = None
    interface: str = ""
    node: str = ""
    doubles_up: bool = False

    @classmethod
    def alone(cls, world_size: int, port: int) -> "NodeContext":
        """Return the context of the only supervisor, which serves the store itself."""
        return cls(world_size, world_size, StoreAddress(LOOPBACK, port), None, loopback_interface())

    @property
    def on_node(self) -> str:
        """Where the ranks of this supervisor are, to follow their number in a message; empty if there is one node."""
        return f" on node {self.node}" if self.node else ""

    @property
    def is_alone(self) -> bool:
        """Whether all ranks are on this node."""
        return self.local_world_size == self.world_size

    def local_rank(self, rank: int) -> int:
        """Return the number of ``rank`` among those of its node."""
        return rank % self.local_world_size

    def node_rank(self, rank: int) -> int:
        """Return the number of the node slot that ``rank`` belongs to, wherever its process runs."""
        return rank // self.local_world_size


def loopback_interface() -> str:
    """Return the name of the loopback interface; empty if it has none of the usual names."""
    found = [name for _, name in socket.if_nameindex() if name in _LOOPBACKS]
    return found[0] if found else ""
