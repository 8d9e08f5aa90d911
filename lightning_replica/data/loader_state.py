"""Where one rank's loader stands: plain data, in snapshots, mirrors and checkpoints."""

from collections.abc import Iterable
from typing import Any, NamedTuple


class LoaderState(NamedTuple):
    """Where one rank's loader stands. See [Note: position].

    Attributes:
        batches: Batches taken in this iteration; the next one is number ``batches``.
        begun: Random state in which the iteration began; None if it has not.
        generator: State of the loader's own generator then; None if it has none.
        workers: Random state of each worker: after its last batch; where no index can be left out, when the iteration
            began. None for one that has drawn nothing since it was seeded.
        reused: Whether the iteration goes on with workers of the one before, which draws no seed for them.
        turn: How many iterations had begun before this one.
        epoch: What the sampler took for the epoch; None if it knows of none.
        first: Random state before the first batch was loaded; None if it has not been, or where workers load.
        seeded: State of the generator from which the seed of workers that live longer was drawn; None without such.
        samplers: What samplers of the user's own classes kept when the iteration began; None without such.
    """

    batches: int
    begun: bytes | None = None
    generator: bytes | None = None
    workers: tuple[bytes | None, ...] = ()
    reused: bool = False
    turn: int = 0
    epoch: int | None = None
    first: bytes | None = None
    seeded: bytes | None = None
    samplers: bytes | None = None

    @classmethod
    def of(cls, plain: Iterable[Any]) -> "LoaderState":
        """The inverse of ``list``: sequences may have become lists on the way."""
        state = cls(*plain)
        return state._replace(workers=tuple(state.workers))
