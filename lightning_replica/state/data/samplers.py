"""What samplers of foreign classes keep from one iteration to the next: generators, orders, counters.

torch's own samplers keep only an epoch, which Lightning sets. Others shuffle a list in place, or draw from a generator
of their own, each time they are iterated. Such state is part of a loader's position, just as the random state of its
process is.
"""

import logging
from collections.abc import Iterator
from functools import cache
from typing import Any

from torch.utils.data import Sampler

from lightning_replica.core import plain
from lightning_replica.state import attributes

log = logging.getLogger(__name__)

_KNOWN = ("torch.", "lightning.", "pytorch_lightning.")
_INSIDE = ("sampler", "batch_sampler", "_sampler", "dataset")  # names under which samplers keep those that they wrap


class Samplers:
    """The samplers of a loader whose classes are foreign, neither torch's nor Lightning's, outermost first.

    Args:
        loader: The loader that Lightning iterates.
    """

    def __init__(self, loader: Any) -> None:
        self._found = list(_foreign(loader))

    def state(self) -> bytes | None:
        """Return what the samplers keep now, without objects of unknown types; None if there are no samplers.

        A replacement has objects of unknown types as its script has made them.
        """
        return plain.pack([list(_kept(sampler)) for sampler in self._found]) if self._found else None

    def put(self, state: bytes | None) -> None:
        """Restore what `state` returned."""
        if state is not None:
            for sampler, kept in zip(self._found, plain.unpack(state, placed=True), strict=True):
                attributes.put_plain_into(vars(sampler), kept)


def _kept(sampler: Any) -> Iterator[list[Any]]:
    for name, value in vars(sampler).items():
        if attributes.is_state(value):
            try:
                yield [name, attributes.to_plain(value)]
            except plain.NotPlainError as error:
                _warn(type(sampler).__name__, name, str(error))


@cache
def _warn(sampler: str, name: str, problem: str) -> None:
    log.warning(
        "%s.%s is not restored after a fault: %s. If it changes from epoch to epoch, the order of the data may differ."
        " Keep numbers, tensors, arrays, generators and containers of these in a sampler.",
        sampler,
        name,
        problem,
    )


def _foreign(loader: Any) -> Iterator[Any]:
    ahead = [getattr(loader, name, None) for name in ("sampler", "batch_sampler")]
    seen: set[int] = set()
    while ahead:
        sampler = ahead.pop()
        if sampler is None or id(sampler) in seen or not hasattr(sampler, "__dict__"):
            continue
        seen.add(id(sampler))
        known = type(sampler).__module__.startswith(_KNOWN)
        if known or isinstance(sampler, Sampler) or hasattr(sampler, "__iter__"):
            ahead += [vars(sampler).get(name) for name in _INSIDE if _may_sample(vars(sampler).get(name))]
            if not known:
                yield sampler


def _may_sample(value: Any) -> bool:
    """Return whether this may be a sampler inside of another one; Lightning wraps a sampler as if it were a dataset."""
    return isinstance(value, Sampler) or type(value).__name__ == "_DatasetSamplerWrapper"
