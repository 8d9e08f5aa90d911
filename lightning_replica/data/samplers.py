"""What samplers that other people have written keep from one iteration to the next: generators, orders, counters.

torch's own samplers keep nothing but an epoch, which Lightning sets. Others shuffle a list in place, or draw from a
generator of their own, each time they are iterated; such a state is as much a part of where a loader stands as the
random state of its process.
"""

import logging
from collections.abc import Iterator
from functools import cache
from typing import Any

from torch.utils.data import Sampler

from lightning_replica import attributes, plain

log = logging.getLogger(__name__)

_KNOWN = ("torch.", "lightning.", "pytorch_lightning.")
_INSIDE = ("sampler", "batch_sampler", "_sampler", "dataset")  # what samplers that wrap others call these


class Samplers:
    """The samplers of a loader that are of foreign classes, outermost first.

    Args:
        loader: What Lightning iterates.
    """

    def __init__(self, loader: Any) -> None:
        self._found = list(_foreign(loader))

    def state(self) -> bytes | None:
        """What they keep now; None if there are none. Objects that are not known stay as the script has made them."""
        return plain.pack([list(_kept(sampler)) for sampler in self._found]) if self._found else None

    def put(self, state: bytes | None) -> None:
        """The inverse of `state`."""
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
        "%s.%s is not put back after a fault, %s. If it changes from epoch to epoch, the order of the data may differ."
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
    """Whether this may be a sampler inside of another one; Lightning wraps one as if it were a dataset."""
    return isinstance(value, Sampler) or type(value).__name__ == "_DatasetSamplerWrapper"
