"""The nodes that have come to a run, with their numbers and addresses. `meeting` decides which of them train first."""

import json
from dataclasses import dataclass

import torch.distributed as dist

from lightning_replica.control import keys
from lightning_replica.control.untrusted import from_json
from lightning_replica.errors import ConfigurationError, ProtocolError
from lightning_replica.nodes.liveness import Heartbeat
from lightning_replica.nodes.placement import Placement

_MOST = 100_000  # nodes, over the whole run


@dataclass(frozen=True)
class Member:
    """A node that has come.

    Attributes:
        number: Its number, in the order in which nodes have come. A node that comes again gets a new one.
        address: Its IP address.
        port: A port at which its supervisor listens as long as it lives.
        name: Its name, for messages.
    """

    number: int
    address: str
    port: int
    name: str

    def to_json(self) -> str:
        """Return the member as a line of JSON."""
        return json.dumps([self.number, self.address, self.port, self.name])

    @classmethod
    def from_json(cls, line: bytes) -> "Member":
        """Make a member from what `to_json` returned.

        Raises:
            ProtocolError: If it is something else.
        """
        try:
            number, address, port, name = from_json(line)
            return cls(int(number), str(address), int(port), str(name))
        except (ValueError, TypeError, OverflowError) as error:
            raise ProtocolError(f"{line[:80]!r} is no node: {error}") from error


def register(store: dist.Store, address: str, port: int, name: str) -> Member:
    """Give this node a number, and make it known to all others."""
    while True:
        member = Member(store.add(keys.NODES_COME, 1) - 1, address, port, name)
        # A counter is a hint: a stranger can set it back.
        own = member.to_json()
        if store.compare_set(keys.node(member.number), "", own) == own.encode():
            break
    store.compare_set(keys.PHASE, "", "set-up")
    store.set(keys.beat(member.number), Heartbeat().to_json())
    return member


def come(store: dist.Store) -> int:
    """Return how many nodes have come, as far as the counter can be believed: anyone may write to the store."""
    return min(max(store.add(keys.NODES_COME, 0), 0), _MOST)


def first_placement(store: dist.Store) -> Placement:
    """Wait for the first placement, and return it.

    Raises:
        ConfigurationError: If it was written over by a stranger.
    """
    try:
        return Placement.from_json(store.get(keys.NODES_FIRST))
    except ProtocolError as error:
        raise ConfigurationError(
            f"The value of the key {keys.NODES_FIRST!r} in the store cannot be used: {error}. Another program writes"
            " to this store. Start the run with a secret (LIGHTNING_REPLICA_SECRET), or use another port."
        ) from error
