"""Which nodes are lost, by their signs of life. Pure: no store, no clock."""

from collections.abc import Mapping


class Life:
    """Judges nodes by counters that they raise, and by the clock of this process only.

    Time counts against a node only while this process looks. If this process was stopped itself, all others seem silent
    for as long, although they were not.

    Args:
        timeout_s: Time without a sign of life after which a node is lost.
        look_s: Time between two looks, in seconds; a longer pause counts as two such times.
    """

    def __init__(self, timeout_s: float, look_s: float) -> None:
        self._timeout_s, self._most_s = timeout_s, 2 * look_s
        self._seen: dict[int, int] = {}
        self._silent_s: dict[int, float] = {}
        self._looked = 0.0

    def look(self, counters: Mapping[int, int], now: float) -> frozenset[int]:
        """Return the nodes that are lost.

        Args:
            counters: The counter of each node.
            now: The time, in seconds.
        """
        passed_s = min(now - self._looked, self._most_s) if self._seen else 0.0
        self._looked = now
        for node, counter in counters.items():
            changed = self._seen.get(node) != counter
            self._silent_s[node] = 0.0 if changed else self._silent_s[node] + passed_s
            self._seen[node] = counter
        return frozenset(node for node in counters if self._silent_s[node] > self._timeout_s)
