"""Digests of the bits in a shard, and how peers decide from them whose bits are wrong.

The decision is a pure function of the digests of all holders of a shard, so that all of them decide the same.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

GuardMode: TypeAlias = Literal["sampled", "full", "off"]


@dataclass(frozen=True)
class Digest:
    """One rank's digest of a part of its shard, at one step.

    Attributes:
        words: Size of the whole shard, in words; shards of different sizes cannot be compared.
        value: Digest of the part, 64 bits, signed.
        changed: Whether the part had another digest when this rank last took it, although torch knows of no write to
            it since.
    """

    words: int
    value: int
    changed: bool

    @property
    def plain(self) -> tuple[int, int, int]:
        """The digest as plain numbers, for `of`."""
        return (self.words, self.value, int(self.changed))

    @classmethod
    def of(cls, plain: Sequence[int]) -> "Digest":
        """Make a digest from what `plain` returned."""
        words, value, changed = plain
        return cls(words, value, bool(changed))


def suspects(digests: Mapping[int, Digest]) -> tuple[int, ...]:
    """Return the ranks whose shard cannot be trusted: all ranks if the digests do not show which are right.

    A majority is right. Without a majority, the ranks whose shard has not changed since their last update are right, if
    their digests agree. If all shards have changed alike, user code has changed them: no rank is wrong.

    Args:
        digests: The digests by rank, of all holders of a shard that have sent one.
    """
    if len({digest.words for digest in digests.values()}) != 1:
        return ()
    if len(digests) == 1:
        return tuple(rank for rank, digest in digests.items() if digest.changed)
    counts = Counter(digest.value for digest in digests.values())
    value, times = counts.most_common(1)[0]
    if 2 * times <= len(digests):
        steady = {digest.value for digest in digests.values() if not digest.changed}
        if len(steady) != 1:
            return tuple(digests)
        (value,) = steady
    return tuple(rank for rank, digest in digests.items() if digest.value != value)


def all_changed_alike(digests: Mapping[int, Digest]) -> bool:
    """Return whether every holder's shard has changed in the same way, which means that user code has changed it."""
    agreed = len(digests) > 1 and len({(digest.words, digest.value) for digest in digests.values()}) == 1
    return agreed and all(digest.changed for digest in digests.values())
