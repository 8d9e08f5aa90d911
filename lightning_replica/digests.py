"""What a rank says of the bits in its shard, and whom its peers believe.

A pure function of what all holders of a shard have said, so that each of them comes to the same answer.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

GuardMode: TypeAlias = Literal["sampled", "full", "off"]


@dataclass(frozen=True)
class Digest:
    """The bits that one rank has found in a part of its shard, at one step.

    Attributes:
        words: Size of the whole shard; shards of another size cannot be compared.
        value: Digest of the part, 64 bits, signed.
        changed: Whether the part had another digest when this rank last made it, and nothing that it knows of has
            written there since.
    """

    words: int
    value: int
    changed: bool

    @property
    def plain(self) -> tuple[int, int, int]:
        """As plain numbers."""
        return (self.words, self.value, int(self.changed))

    @classmethod
    def of(cls, plain: Sequence[int]) -> "Digest":
        """The inverse of `plain`."""
        words, value, changed = plain
        return cls(words, value, bool(changed))


def suspects(digests: Mapping[int, Digest]) -> tuple[int, ...]:
    """Ranks whose shard cannot be trusted; all of them where nobody can tell who is right.

    A majority is right. Where there is none, whoever has not changed since its last update is, if those agree. Where
    all have changed alike, code of the user's has done it: nobody is wrong.

    Args:
        digests: By rank, of all holders of a shard that could be heard.
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
    """Whether something has changed every holder's shard in the same way: code of the user's."""
    agreed = len(digests) > 1 and len({(digest.words, digest.value) for digest in digests.values()}) == 1
    return agreed and all(digest.changed for digest in digests.values())
