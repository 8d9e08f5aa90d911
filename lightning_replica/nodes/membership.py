"""Who is in: torchelastic's rendezvous decides which nodes are the first to train.

Every node that comes takes part in one round of the rendezvous. The round is complete once `nnodes` nodes have come; a
node that comes later is a spare. Rounds never change: which node has which ranks from then on is a `Placement`.

[Note: one after the other]
In the rendezvous, a node joins by writing the state of all nodes anew, if no other node has written it meanwhile. If
all nodes try at once, nearly all of them fail and try again; and while they wait, each of them reads the whole state
every second. That is quadratic. So each node waits until the one that came before it has joined, and from then until
the round is complete it asks nothing.
"""

import json
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from lightning_replica.control import keys
from lightning_replica.control.unreadable import from_json
from lightning_replica.errors import ConfigurationError, ProtocolError
from lightning_replica.nodes.life import Sign
from lightning_replica.nodes.placement import Placement
from lightning_replica.nodes.settings import NodeSettings

# Our own signs of life decide who is lost (`life`). The rendezvous would compare the clocks of different machines.
_NEVER_S = 10**7
_TURN: Final = timedelta(seconds=5)
_MOST = 100_000  # nodes, over the whole run
_NO_SECOND_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


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
    store.set(keys.beat(member.number), Sign().to_json())
    return member


def come(store: dist.Store) -> int:
    """Return how many nodes have come, as far as the counter can be believed: anyone may write to the store."""
    return min(max(store.add(keys.NODES_COME, 0), 0), _MOST)


def join(store: dist.Store, member: Member, settings: NodeSettings) -> Placement:
    """Wait until all nodes have come, and return the first placement.

    Raises:
        ConfigurationError: If too few nodes have come within ``join_timeout_s``.
    """
    os.environ[_NO_SECOND_STORE] = "1"  # torchelastic would serve one more store, on every interface
    handler = DynamicRendezvousHandler.from_backend(
        settings.run_id,
        store,
        _OneRound(store, settings, member.number),
        min_nodes=settings.nnodes,
        max_nodes=settings.nnodes,
        local_addr=settings.address,
        timeout=RendezvousTimeout(join=timedelta(seconds=settings.join_timeout_s)),
        keep_alive_interval=_NEVER_S,
    )
    try:
        slot = handler.next_rendezvous().rank
    except _FullError:
        return first_placement(store)
    except RendezvousTimeoutError as error:
        raise ConfigurationError(
            f"Only {come(store)} of nnodes={settings.nnodes} nodes have come to {settings.store.endpoint} within"
            f" {settings.join_timeout_s:g} s. Start the same command on the other nodes, or raise the time-out of the"
            " rendezvous (--rdzv-conf join_timeout=...)."
        ) from error
    store.set(keys.slot(slot), str(member.number))
    if slot == 0:
        slots = tuple(int(store.get(keys.slot(each))) for each in range(settings.nnodes))
        store.set(keys.NODES_FIRST, Placement(slots).to_json())
    try:
        store.wait([keys.NODES_FIRST], timedelta(seconds=settings.join_timeout_s))
    except dist.DistStoreError as error:
        raise ConfigurationError(
            f"All nnodes={settings.nnodes} nodes have come to {settings.store.endpoint}, but the one that places"
            " the ranks has died since. Start the run again, with another --rdzv-id if the store lives on."
        ) from error
    return first_placement(store)


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


class _FullError(Exception):
    """The round is complete, and this node is not in it."""


def _wait_for_turn(store: dist.Store, number: int) -> None:
    """Wait until the node that came before this one has joined, or nobody has joined for some seconds: it has died."""
    joined = -1
    while number > 0 and joined != (joined := store.add(keys.NODES_JOINED, 0)):
        try:
            store.wait([keys.joined(number - 1)], _TURN)
        except dist.DistStoreError:
            continue
        return


class _OneRound(C10dRendezvousBackend):
    """Keeps the rendezvous from asking the store every second as long as it waits.

    Args:
        store: The store.
        settings: The nodes' settings.
        number: The number of this node.
    """

    def __init__(self, store: dist.Store, settings: NodeSettings, number: int) -> None:
        super().__init__(store, settings.run_id)
        self._timeout, self._number = timedelta(seconds=settings.join_timeout_s), number
        self._nnodes, self._turn, self._joined = settings.nnodes, False, False

    def get_state(self) -> Any:
        """Return the state of the rendezvous; see `C10dRendezvousBackend`. If this node has joined, wait for the rest.

        Raises:
            RendezvousTimeoutError: If too few nodes come.
        """
        if not self._turn:  # not before the handler begins, as that pauses for a random time first
            _wait_for_turn(self._store, self._number)
            self._turn = True
        if self._joined:
            try:
                self._store.wait([keys.NODES_FULL], self._timeout)
            except dist.DistStoreError as error:
                raise RendezvousTimeoutError from error
        # All nodes of the round have left the rendezvous before the placement is written.
        if self._store.check([keys.NODES_FIRST]):
            self._pass_on()
            raise _FullError
        return super().get_state()

    def set_state(self, state: bytes, token: Any = None) -> Any:
        """Write the state of the rendezvous; see `C10dRendezvousBackend`.

        A node does so only to join, or, if it has come too late for that, to be put on the list of those that wait.
        """
        done = super().set_state(state, token)
        if done is not None and done[2] and not self._joined:
            self._joined = True
            self._pass_on()
            if self._store.add(keys.NODES_JOINED, 1) >= self._nnodes:
                self._store.set(keys.NODES_FULL, "")
        return done

    def _pass_on(self) -> None:
        """Let the next node join."""
        self._store.set(keys.joined(self._number), "")
