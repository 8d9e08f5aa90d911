"""What a loader draws from, as far as it is the user's: samplers, datasets, collate functions, iterable objects.

torch's own samplers keep an epoch, which Lightning sets, a generator, which may be the user's, and weights or indices,
which hooks may change. Others shuffle a list in place, or draw from a generator of their own, each time they are
iterated; a dataset without workers counts what it was asked for; a stream goes on where its last epoch ended. Such
state is part of a loader's position, just as the random state of its process is.

[Note: what workers copy]
Workers get a copy of the dataset and its functions when they start. What hooks change in them later (``dataset.level``
in ``on_train_epoch_start``) reaches the workers that start in the next epoch. So workers that start again in the middle
of an epoch have to copy what was there when its iteration began.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from torch.utils.data import DataLoader, Sampler

from lightning_replica._compat.packages import is_of_lightning
from lightning_replica.core import plain
from lightning_replica.core.inexact import Report, warn
from lightning_replica.state.objects.capture import Anchors, Root
from lightning_replica.state.objects.tracked import MIRRORED, Tracked

_LIMITS: Final = MIRRORED._replace(
    why="it is too large to be kept with the position of its loader, and goes back to what it held in the beginning",
    scope="fault",
)
# Of torch's samplers, what other code restores or what is a source itself. Code may change the rest: weights, indices.
_OF_OTHERS: Final = frozenset(("data_source", "dataset", "sampler", "epoch"))
_COPIED_BYTES: Final = 2**24  # of data; the rest is watched without copies


class Sources:
    """What a loader draws from, as far as the user's code may change it: samplers, and objects of the user's classes.

    Args:
        loader: The loader that Lightning iterates.
        report: Called with what is not restored exactly.
        found_in: Returns the objects: `sources_of` those that it draws from in this process, `copied_by_workers`
            those that workers copy.
    """

    def __init__(
        self, loader: Any, report: Report = warn, found_in: "Callable[[Any], Iterator[Any]] | None" = None
    ) -> None:
        self._found_in = found_in or sources_of
        self._found = found = list(self._found_in(loader))
        self._roots = [
            Root(each, f"{type(each).__name__} of the loader", own=_OF_OTHERS if _is_known(each) else frozenset())
            for each in found
            if _has_state(each)
        ]
        if len({root.name for root in self._roots}) < len(self._roots):
            self._roots = [replace(root, name=f"{root.name}, {place}") for place, root in enumerate(self._roots)]
        self._anchored = [(root.name, root.value) for root in self._roots]
        self._anchored += [(f"source {place}", each) for place, each in enumerate(found)]
        self._anchors = Anchors.of(self._anchored)
        self._tracked = Tracked(report, copied_bytes=_COPIED_BYTES)
        self._packed: tuple[Any, bytes] = None, b""
        if self._roots:
            self._tracked.begin(self._roots, self._anchors)

    def state(self, begins: bool = True) -> bytes | None:
        """Return what has changed since the loader was made; None if there is nothing of the user's.

        Args:
            begins: Whether an iteration begins. Between two batches, less of what is large is compared.
        """
        if not self._roots:
            return None
        taken = self._tracked.take(self._roots, self._anchors, begins)
        if self._packed[0] is not taken:
            self._packed = taken, plain.pack(self._tracked.encoded(taken, _LIMITS))
        return self._packed[1]

    def put(self, state: bytes | None) -> None:
        """Restore what `state` returned."""
        if state is not None and self._roots:
            self._tracked.return_to_beginning()
            self._tracked.put_sent(self._roots, self._anchored, plain.unpack(state, placed=True))

    def is_of(self, loader: Any) -> bool:
        """Return whether another loader, which was made later, draws from the same objects."""
        return [id(each) for each in self._found_in(loader)] == [id(each) for each in self._found]

    @contextmanager
    def holding(self, state: bytes | None) -> Iterator[None]:
        """Restore what `state` returned, and at the end of the block what the objects held at its beginning."""
        if state is None or not self._roots or state == self.state():
            yield
            return
        now = self._tracked.take(self._roots, self._anchors)
        self.put(state)
        try:
            yield
        finally:
            self._tracked.put_back(now)


def copied_by_workers(loader: Any) -> Iterator[Any]:
    """Yield what workers copy when they start: the dataset and the functions that they call."""
    if isinstance(loader, DataLoader) and loader.num_workers:
        found = (loader.dataset, loader.collate_fn, loader.worker_init_fn)
        yield from {id(each): each for each in found if each is not None}.values()


def sources_of(loader: Any) -> Iterator[Any]:
    """Yield what a loader draws from in this process, and the loader itself if it is no DataLoader."""
    ahead = [loader] if not isinstance(loader, DataLoader) else []
    ahead += [getattr(loader, name, None) for name in ("sampler", "batch_sampler")]
    if isinstance(loader, DataLoader) and not loader.num_workers:  # else each worker has copies of its own
        ahead += [loader.dataset, loader.collate_fn]
    seen: set[int] = set()
    while ahead:
        source = ahead.pop(0)
        if source is None or id(source) in seen:
            continue
        seen.add(id(source))
        yield source
        if _may_sample(source) or hasattr(source, "__iter__"):
            ahead += [each for value in getattr(source, "__dict__", {}).values() for each in _samplers_in(value)]


def _is_known(source: Any) -> bool:
    """Return whether the class of a source is torch's, Lightning's or this package's."""
    module = type(source).__module__
    return is_of_lightning(module) or module.partition(".")[0] in ("torch", "builtins", "lightning_replica")


def _has_state(source: Any) -> bool:
    """Return whether a source has attributes that are not restored by others; of torch's, samplers do."""
    return hasattr(source, "__dict__") and (isinstance(source, Sampler) or not _is_known(source))


def _samplers_in(value: Any) -> list[Any]:
    """Return what may be samplers of what a sampler keeps under some name."""
    inside = value.values() if type(value) is dict else value if type(value) in (list, tuple) else (value,)
    return [each for each in inside if _may_sample(each)]


def _may_sample(value: Any) -> bool:
    """Return whether this may be a sampler inside of another one; Lightning wraps a sampler as if it were a dataset."""
    return isinstance(value, Sampler) or type(value).__name__ == "_DatasetSamplerWrapper"
