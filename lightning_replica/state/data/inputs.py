"""Which ranks still have inputs in an epoch, where ranks may have different numbers of batches.

A rank without further inputs goes on fetching. It gets a `Shadow` in place of a batch, until no rank has
inputs any more. So all ranks count the same batches, validate at the same time, and end the epoch together.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from lightning_replica.errors import ConfigurationError


class Shadow:
    """Stands for the batch of a rank that has no further inputs."""


class Inputs:
    """Tells which ranks have a batch, fetch by fetch.

    Args:
        rank: This rank.
        lengths: Returns the number of batches of each rank, or nothing if some rank's data has no length.
        fetched: Returns the number of batches fetched in this epoch, if the data has a length.
        ask: Tells all ranks whether this one has another batch, and returns the answers. Collective. It is used only if
            there are no lengths.
    """

    def __init__(
        self,
        rank: int,
        lengths: Callable[[], Sequence[int]],
        fetched: Callable[[], int],
        ask: Callable[[bool], Sequence[bool]],
    ) -> None:
        self._rank, self._lengths, self._fetched, self._ask = rank, lengths, fetched, ask
        self._asked: deque[Sequence[bool]] = deque(maxlen=2)  # of the batch under way, and of one ahead of it
        self._ended = False

    def __len__(self) -> int:
        """Return the number of batches of the epoch.

        Raises:
            TypeError: If some rank's data has no length.
        """
        lengths = self._lengths()
        if not lengths:
            raise TypeError("Some rank's data has no length.")
        return max(lengths)

    def begin(self) -> None:
        """Begin, or begin again at some batch of an epoch."""
        self._asked.clear()
        self._ended = False

    def fetch(self, own: Callable[[], Any]) -> Any:
        """Return the next batch, or a `Shadow`, with the numbers that a combined loader adds to it.

        Args:
            own: Returns this rank's next batch.

        Raises:
            StopIteration: If no rank has inputs any more.
            ConfigurationError: If this rank's data has fewer batches than its length says.
        """
        lengths = self._lengths()
        item = self._own(own, lengths)
        if not lengths:
            answers = self._ask(item is not None)
            if not any(answers):
                raise StopIteration
            self._asked.append(answers)
        return (Shadow(), 0, 0) if item is None else item

    def _own(self, own: Callable[[], Any], lengths: Sequence[int]) -> Any:
        if self._ended or (lengths and self._fetched() >= lengths[self._rank]):
            return None
        try:
            return own()
        except StopIteration:
            if lengths:
                raise ConfigurationError(
                    f"The training data of rank {self._rank} ended after {self._fetched()} batches, but its length is"
                    f" {lengths[self._rank]}. Mend its `__len__`, or remove it."
                ) from None
            self._ended = True
            return None

    def present(self, batch: int, ahead: int) -> tuple[bool, ...]:
        """Return for each rank whether it has this batch of the epoch.

        Args:
            batch: Number of the batch, from 0 on; the one under way or the next.
            ahead: How many fetches followed it.
        """
        lengths = self._lengths()
        if lengths:
            return tuple(batch < length for length in lengths)
        return tuple(self._asked[-1 - ahead])
