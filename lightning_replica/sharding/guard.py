"""Detection of bits of the shard that changed although no code changed them.

[Note: wrong bits]
A rank takes a digest of its shard after every update, and again twice before the next update: at the commit, where the
digest is sent to the peers with the mirrored state, and right before the update changes anything. So if the memory of
a rank changes, that rank finds it by itself, whatever its peers say. If an update computes wrong bits, the peers'
digests differ; they must be equal, because they are made from the same bits.

Lawful changes of the shard raise no alarm: torch counts writes (`data_version`), and a tensor that was written to or
replaced since then counts as new. Writes that torch does not count (``tensor.data``, numpy) happen in the user's hooks,
on all peers alike. The peers then agree at the commit (`digests.suspects`), and from then on this rank no longer takes
a change in hooks for a fault. No user code runs between the commit's digest and the update.

Where user code has written to weights, the shard takes its values from them, which also undoes a change of its bits.
By then other ranks may have read the wrong bits in a gather. So a digest is taken before (`adopt`), and goes into the
one that is sent at the commit (tests/faults/test_wrong_bits.py::test_wrong_bits_that_only_others_have_read).

"sampled" reads one of `PARTS` equal ranges of all words, another one in each step. The step number decides which, so
that peers always read the same.
"""

import logging
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_replica._compat.torch import write_count
from lightning_replica.core.digests import Digest, GuardMode, all_changed_alike, digest, suspects
from lightning_replica.errors import CorruptedShardError
from lightning_replica.sharding.listing import Listing, Listings
from lightning_replica.sharding.optimizer import ShardedOptimizer

log = logging.getLogger(__name__)


PARTS = 64
"""The number of steps after which "sampled" has read everything."""

_FACTOR = 0x9E3779B97F4A7C15  # any odd number
_MASK = 2**64 - 1


@dataclass(frozen=True)
class Region:
    """A range of words in one tensor of the shard.

    Attributes:
        name: "main", or the kind of optimizer state ("exp_avg").
        tensor: Reference to the tensor, which may be gone by now.
        writes: How often the tensor had been written to when the region was listed.
        start: The first word.
        stop: One past the last word.
    """

    name: str
    tensor: "weakref.ref[Tensor]"
    writes: int
    start: int
    stop: int

    def untouched(self) -> bool:
        """Return whether the tensor still exists and torch has counted no write to it since."""
        tensor = self.tensor()
        return tensor is not None and write_count(tensor) == self.writes

    def digest(self) -> int:
        """Return the digest of the words as they are now; 0 if the tensor is gone."""
        tensor = self.tensor()
        return 0 if tensor is None else digest(tensor, self.start, self.stop)


@dataclass(frozen=True)
class _Memory:
    """Digests that were taken, and the regions that they were taken of.

    Attributes:
        step: The step of the shard.
        words: Number of words in the whole shard.
        regions: The regions that were read.
        values: The digest of every region.
    """

    step: int
    words: int
    regions: tuple[Region, ...]
    values: tuple[int, ...]

    @classmethod
    def of(cls, step: int, words: int, regions: Iterable[Region]) -> "_Memory":
        """Take the digests of ``regions``."""
        regions = tuple(regions)
        return cls(step, words, regions, tuple(region.digest() for region in regions))

    @property
    def names(self) -> str:
        """The names of what was read."""
        return ", ".join(dict.fromkeys(region.name for region in self.regions))

    def untouched(self) -> bool:
        """Return whether torch has counted no write to the regions since."""
        return all(region.untouched() for region in self.regions)

    def again(self) -> "_Memory":
        """Take the digests of the same regions again."""
        return self.of(self.step, self.words, self.regions)


class Guard:
    """Checks the shard of one rank for wrong bits. See [Note: wrong bits].

    Args:
        mode: "full" reads the whole shard, "sampled" a part of it that changes with the step, "off" nothing.
        rank: This rank.
        shard: Its shard.
    """

    def __init__(self, mode: GuardMode, rank: int, shard: int) -> None:
        self._parts = {"full": 1, "sampled": PARTS, "off": 0}[mode]
        self._rank, self._shard = rank, shard
        self._listings = Listings()
        self._memory: _Memory | None = None
        self._changed: tuple[str, ...] = ()
        self._adopted: list[int] = []  # digests of what was overwritten by weights, since the step began
        self._adopted_at: int | None = None  # the newest step in which weights were taken into the shard
        self._excused = False
        self._found = ""

    @property
    def found(self) -> str:
        """What is wrong with this rank's shard; empty if nothing is known to be wrong.

        A change at rest counts even before it is compared with the peers: it may be the cause of a fault.
        """
        if self._changed and not self._found and self._memory is not None:
            return self._text(self._memory.step, _at_rest(self._changed))
        return self._found

    def renew(self, step: int, optimizers: Sequence[ShardedOptimizer]) -> None:
        """Take the digest of a shard that was just updated. From now on its bits must not change."""
        if self._memory is not None and self._memory.step != step:
            self._adopted = []
        self._memory = self._read(step, optimizers)

    def reset(self, step: int, optimizers: Sequence[ShardedOptimizer]) -> None:
        """Take the digest of a shard that came from a peer, and clear what was wrong before."""
        self.renew(step, optimizers)
        self._changed, self._adopted, self._found = (), [], ""

    def begin_window(self) -> None:
        """Forget what was overwritten in an earlier attempt at the same step."""
        self._adopted = []

    def adopt(self, step: int, optimizers: Sequence[ShardedOptimizer]) -> None:
        """Take the digest of a shard that is about to take its values from the weights.

        Before the first step there is none to compare it with, and no other rank has read the shard.
        """
        self._adopted_at = step
        known = self._memory is not None
        digest = self.digest(step, optimizers)
        if known and digest is not None:
            self._adopted.append(digest.value)

    def keep(self, step: int, optimizers: Sequence[ShardedOptimizer]) -> None:
        """Take the digest again if the shard was lawfully written to, or has reached another step."""
        if self._memory is None or self._memory.step != step:
            self.renew(step, optimizers)
        elif not self._memory.untouched():
            self.digest(step, optimizers)

    def digest(self, step: int, optimizers: Sequence[ShardedOptimizer]) -> Digest | None:
        """Take the digest again, after the user's hooks.

        Returns:
            The digest to send to the peers; None if nothing is checked.
        """
        before, now = self._memory, self._read(step, optimizers)
        if now is None:
            return None
        if before is not None and not self._excused:
            self._changed = self._changed or _differences(before, now)
        self._memory = now
        return Digest(now.words, _fold((*self._adopted, *now.values)), bool(self._changed))

    def compare(self, step: int, digests: Mapping[int, Digest]) -> None:
        """Compare the digests of all peers, this rank's own included.

        Raises:
            CorruptedShardError: If this rank's shard is wrong, or the digests do not show whose is.
        """
        wrong = suspects(digests)
        if self._rank in wrong:
            self._fail(step, self._how(step, wrong, digests))
        if all_changed_alike(digests) and not self._excused:
            self._excused = True
            log.info(
                "Hooks change the shard or the optimizer's state, so these are checked at rest only where no hooks ran."
            )
        self._changed = ()

    def check(self, after_hooks: bool = False) -> None:
        """Take the digest again, where this rank decides without its peers.

        Args:
            after_hooks: Whether user code may have run since the last digest.

        Raises:
            CorruptedShardError: If the digest has changed.
        """
        before = self._memory
        if before is None or (after_hooks and self._excused):
            return
        self._changed = self._changed or _differences(before, before.again())
        if self._changed:
            self._fail(before.step, _at_rest(self._changed))

    def _how(self, step: int, wrong: Sequence[int], digests: Mapping[int, Digest]) -> str:
        if self._changed:
            return _at_rest(self._changed)
        values = ", ".join(f"rank {rank}: {digest.value & _MASK:016x}" for rank, digest in sorted(digests.items()))
        names = self._memory.names if self._memory is not None else ""
        if len(wrong) == len(digests):
            return (
                f"its holders have different bits after an update, and none of them is known to be right"
                f" (digests of {names}: {values}){self._suspicion(step)}"
            )
        return f"an update gave different bits than on its peers (digests of {names}: {values})"

    def _suspicion(self, step: int) -> str:
        """Say that user code may be why holders differ, if it has written to weights since all was last compared."""
        if self._adopted_at is None or step - self._adopted_at > self._parts:
            return ""
        return (
            f". Your code has written to weights (seen at step {self._adopted_at}): it must write the same values on"
            " all ranks. Average what it computes with `trainer.strategy.reduce`"
        )

    def _fail(self, step: int, how: str) -> None:
        self._found = self._text(step, how)
        raise CorruptedShardError(self._found)

    def _text(self, step: int, how: str) -> str:
        return f"Shard {self._shard} of rank {self._rank} is corrupted at step {step}: {how}"

    def _read(self, step: int, optimizers: Sequence[ShardedOptimizer]) -> _Memory | None:
        """Take the digests of the part of the shard that is due at ``step``."""
        if not self._parts:
            return None
        listing = self._listings.of(optimizers)
        words, part = listing.words, step % self._parts
        return _Memory.of(step, words, regions(listing, part * words // self._parts, (part + 1) * words // self._parts))


def regions(listing: Listing, start: int, stop: int) -> list[Region]:
    """Return the regions that hold the words ``start`` to ``stop`` of all tensors in a row."""
    return [
        Region(name, weakref.ref(tensor), write_count(tensor), low, high)
        for name, tensor, low, high in listing.parts(start, stop)
    ]


def _at_rest(changed: Sequence[str]) -> str:
    more = f", and {len(changed) - 3} more" if len(changed) > 3 else ""
    return f"its memory changed at rest ({'; '.join(changed[:3])}{more})"


def _differences(before: _Memory, now: _Memory) -> tuple[str, ...]:
    """Return what has changed although torch has counted no write in between; lawful writes are left out."""
    fresh = {(id(r.tensor()), r.start, r.stop): value for r, value in zip(now.regions, now.values, strict=True)}
    found = []
    for region, old in zip(before.regions, before.values, strict=True):
        if region.untouched():
            key = (id(region.tensor()), region.start, region.stop)
            new = fresh[key] if key in fresh else region.digest()
            if new != old:
                found.append(f"{region.name}: digest {old:016x}, now {new:016x}")
    return tuple(found)


def _fold(values: Sequence[int]) -> int:
    folded = 0
    for value in values:
        folded = (folded * _FACTOR + value) & _MASK
    return folded - 2**64 if folded >= 2**63 else folded
