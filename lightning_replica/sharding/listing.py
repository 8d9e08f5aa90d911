"""The tensors that a shard consists of."""

import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from lightning_replica.core.digests import words_of
from lightning_replica.sharding.optimizer import ShardedOptimizer

_PLAIN = (Tensor, nn.Parameter)  # it is not known what subclasses of tensors hold


def shard_tensors(optimizers: Iterable[ShardedOptimizer[Any]]) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the shard with its kind: values, then state by piece; peers have the same order."""
    for optimizer in optimizers:
        for buffers in optimizer.buffers:
            yield "main", buffers.main
        for piece in optimizer.pieces:
            state = optimizer.optimizer.state.get(piece.parameter, {})
            for key in sorted(state, key=str):
                tensor = state[key]
                if type(tensor) in _PLAIN and tensor.layout is torch.strided:
                    yield key, tensor


class Listing:
    """All tensors of a shard in a row, as 64-bit words.

    A listing is made once and can be read from any word on. It keeps no tensor alive: a tensor that an optimizer
    replaces is freed at once.

    Args:
        tensors: As `shard_tensors` gives them.
    """

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._entries = [(name, weakref.ref(tensor), words_of(tensor)) for name, tensor in tensors]
        self._ends = list(accumulate(words for _, _, words in self._entries))

    @property
    def words(self) -> int:
        """The number of words of all tensors."""
        return self._ends[-1] if self._ends else 0

    def parts(self, start: int, stop: int) -> Iterator[tuple[str, Tensor, int, int]]:
        """Yield what lies in the words ``start`` to ``stop``: name, tensor, and start and stop in the tensor."""
        for place in range(bisect_right(self._ends, start), len(self._entries)):
            name, ref, words = self._entries[place]
            first = self._ends[place] - words
            if first >= stop:
                return
            tensor = ref()
            if tensor is not None and words:
                yield name, tensor, max(start - first, 0), min(stop - first, words)


class Listings:
    """Lists the shard again only when it consists of other tensors than before."""

    def __init__(self) -> None:
        self._listing = Listing(())
        self._listed: list[int] | None = None  # identities; None once a tensor is gone, as its identity may be reused
        self._seen: list[weakref.ref[Tensor]] = []

    def of(self, optimizers: Sequence[ShardedOptimizer[Any]]) -> Listing:
        """Return the listing of ``optimizers``."""
        present = _present(optimizers)
        identities = list(map(id, present))
        if identities != self._listed:
            self._seen = [weakref.ref(tensor, self._forget) for tensor in present]
            self._listing, self._listed = Listing(shard_tensors(optimizers)), identities
        return self._listing

    def _forget(self, _: object) -> None:
        self._listed = None


def _present(optimizers: Iterable[ShardedOptimizer[Any]]) -> list[Tensor]:
    """Return at least the tensors that `shard_tensors` yields, in any order, in a tenth of the time."""
    found: list[Tensor] = []
    for optimizer in optimizers:
        found += [buffers.main for buffers in optimizer.buffers]
        for state in optimizer.optimizer.state.values():
            if isinstance(state, dict):
                found += [value for value in state.values() if type(value) in _PLAIN]
    return found
