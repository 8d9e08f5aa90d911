"""Heartbeats, and which nodes are lost by them. Pure: no store, no clock."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from lightning_replica.control.untrusted import from_json
from lightning_replica.errors import ProtocolError


@dataclass(frozen=True)
class Heartbeat:
    """What a node writes again and again, to show that it lives.

    Attributes:
        count: A number that the node raises.
        code: The exit code of the node, once its ranks have ended. It sends no more then.
        stalls: Whether all its ranks wait for others for too long.
    """

    count: int = 0
    code: int | None = None
    stalls: bool = False

    def to_json(self) -> str:
        """Return the heartbeat as a line of JSON."""
        return json.dumps([self.count, self.code, self.stalls])

    @classmethod
    def from_json(cls, line: bytes) -> "Heartbeat":
        """Make a heartbeat from what `to_json` returned.

        Raises:
            ProtocolError: If it is something else.
        """
        try:
            count, code, stalls = from_json(line)
            return cls(int(count), None if code is None else int(code), bool(stalls))
        except (ValueError, TypeError, OverflowError) as error:
            raise ProtocolError(f"{line[:80]!r} is no heartbeat: {error}") from error


class Liveness:
    """Judges nodes by whether their heartbeats change, and by the clock of this process only.

    Time counts against a node only while this process looks. If this process was stopped itself, all others seem silent
    for as long, although they were not.

    Args:
        timeout_s: Time without a new heartbeat after which a node is lost.
        look_s: Time between two looks, in seconds; a longer pause counts as two such times.
    """

    def __init__(self, timeout_s: float, look_s: float) -> None:
        self._timeout_s, self._look_s = timeout_s, look_s
        self._seen: dict[int, Heartbeat] = {}
        self._silent_s: dict[int, float] = {}
        self._looked = 0.0

    def look(self, received: Mapping[int, Heartbeat], now: float) -> frozenset[int]:
        """Return the nodes that are lost.

        Args:
            received: The newest heartbeat of each node that this one watches. A node that it watches anew has the whole
                time.
            now: The time, in seconds.
        """
        passed_s = min(now - self._looked, 2 * self._look_s) if self._seen else 0.0
        self._looked = now
        silent = {
            node for node, heartbeat in received.items() if self._seen.get(node) == heartbeat and heartbeat.code is None
        }
        self._silent_s = {node: self._silent_s[node] + passed_s if node in silent else 0.0 for node in received}
        self._seen = dict(received)
        return frozenset(node for node, silent_s in self._silent_s.items() if silent_s >= self._timeout_s)

    def all_stall(self, received: Mapping[int, Heartbeat], nodes: Collection[int]) -> bool:
        """Return whether all ranks of some nodes wait for others. Call this before `look`, with the same heartbeats.

        Each node must have said so in two heartbeats, one after the other: some ranks may have moved between the first
        of one node and that of another.

        Args:
            received: The newest heartbeat of each node.
            nodes: The nodes.
        """
        return all(
            node in received and received[node].stalls and self._has_stalled(node, received[node]) for node in nodes
        )

    def _has_stalled(self, node: int, heartbeat: Heartbeat) -> bool:
        before = self._seen.get(node)
        return before is not None and before.stalls and before.count < heartbeat.count

    @property
    def next_look_s(self) -> float:
        """How long to wait until the next look, so that a silent node is found as soon as its time is over."""
        left = [self._timeout_s - silent_s for silent_s in self._silent_s.values() if silent_s < self._timeout_s]
        return min([self._look_s, *left])
