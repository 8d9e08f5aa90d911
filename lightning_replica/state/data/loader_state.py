"""The position of one rank's loader: plain data, in snapshots, mirrors and checkpoints."""

from collections.abc import Iterable
from typing import Any, NamedTuple


class LoaderState(NamedTuple):
    """The position of one rank's loader. See [Note: position].

    Attributes:
        batches: Number of batches taken in this iteration; the next one is number ``batches``.
        begun: Random state in which the iteration began; None if it has not begun.
        generator: State of the loader's own generator at that time; None if it has none.
        workers: State of each worker: after its last batch or, if no index can be left out, when the iteration
            began. None for a worker that has drawn and changed nothing since it was seeded.
        reused: Whether the iteration continues with the workers of the previous one, and draws no seed for them.
        turn: How many iterations have begun so far, including this one.
        epoch: The epoch that the sampler used; None if it has none, or has not been used yet.
        first: Random state before the first batch was loaded; None if no batch was loaded, or if workers load.
        seeded: State of the generator from which the seed of workers that outlive an iteration was drawn; None if there
            are no such workers.
        sources: What the user's samplers and datasets kept when the iteration began; None if there are none.
        left: What they kept after the last batch; None if they are brought there by loading again what is skipped.
        copied: What workers found when they started (`Copied.state_at_start`); None if there are no workers.
        content: What the dataset keeps in this process, besides the workers' copies; only in a snapshot.
        length: How many batches the iteration has; None if the loader does not say.
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
    sources: bytes | None = None
    left: bytes | None = None
    copied: bytes | None = None
    content: bytes | None = None
    length: int | None = None

    @classmethod
    def of(cls, plain: Iterable[Any]) -> "LoaderState":
        """Return the state whose items are ``plain``; sequences may have become lists on the way."""
        state = cls(*plain)
        return state._replace(workers=tuple(state.workers))
