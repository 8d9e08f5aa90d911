"""What all nodes of a run are started with."""

from dataclasses import dataclass

from lightning_replica.core import checks
from lightning_replica.stores.address import Address


@dataclass(frozen=True)
class NodeSettings:
    """What the user has said about the nodes of a run.

    Attributes:
        nnodes: Number of nodes that train.
        nproc_per_node: Number of ranks on each of them.
        store: Where the whole store is. Each attempt of a run has a part of it; see `attempt`.
        run_id: Name of the run.
        address: IP address of this node.
        spares: Number of further nodes that are expected. More may come.
        node_timeout_s: Time without a heartbeat after which a node is lost.
        join_timeout_s: How long to wait until all nodes have come.
        double_up_after_s: How long to wait for a node in the place of a lost one, before nodes that are left run its
            ranks too; None if they never do.
    """

    nnodes: int
    nproc_per_node: int
    store: Address
    run_id: str
    address: str
    spares: int = 0
    node_timeout_s: float = 10.0
    join_timeout_s: float = 600.0
    double_up_after_s: float | None = None

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigurationError: If one of them makes no sense.
        """
        checks.whole(1, nnodes=self.nnodes, nproc_per_node=self.nproc_per_node, port=self.store.port)
        checks.whole(0, spares=self.spares)
        if self.double_up_after_s is not None:
            checks.seconds(double_up_after_s=self.double_up_after_s)
        checks.seconds(node_timeout_s=self.node_timeout_s, join_timeout_s=self.join_timeout_s)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nnodes * self.nproc_per_node

    @property
    def beat_s(self) -> float:
        """Time between two heartbeats of a node, in seconds."""
        return self.node_timeout_s / 6

    @property
    def fence_s(self) -> float:
        """Time without an answer of the store after which a node ends its own ranks, in seconds.

        It is shorter than `node_timeout_s`: others may replace the ranks after that, and they must have ended by then.
        It is long enough for a link that is down for half of `node_timeout_s`, just after a heartbeat was due.
        """
        return 0.9 * self.node_timeout_s
