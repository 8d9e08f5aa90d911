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
from lightning_replica.state.objects.capture import Anchors, Recorder, Root
from lightning_replica.state.objects.wire import Decoder, Encoder

log = logging.getLogger(__name__)

_KNOWN = ("torch.", "lightning.", "pytorch_lightning.")
_INSIDE = ("sampler", "batch_sampler", "_sampler", "dataset")  # names under which samplers keep those that they wrap


class Samplers:
    """The samplers of a loader whose classes are foreign, neither torch's nor Lightning's, outermost first.

    Args:
        loader: The loader that Lightning iterates.
    """

    def __init__(self, loader: Any) -> None:
        found = list(_foreign(loader))
        self._roots = [Root(sampler, f"{type(sampler).__name__} {place}") for place, sampler in enumerate(found)]
        data = [getattr(each, name, None) for each in (loader, *found) for name in ("dataset", "data_source")]
        self._anchored = [(root.name, root.value) for root in self._roots]
        self._anchored += [(f"data {place}", each) for place, each in enumerate(data)]

    def state(self) -> bytes | None:
        """Return what the samplers keep now; None if there are no samplers.

        A replacement has what cannot be sent as its script has made it.
        """
        if not self._roots:
            return None
        anchors = Anchors.of(self._anchored)
        capture = Recorder(_report).take(self._roots, anchors)
        encoder = Encoder(capture, anchors, _report)
        return plain.pack([encoder.attributes(capture.attributes_of(root)) for root in self._roots])

    def put(self, state: bytes | None) -> None:
        """Restore what `state` returned."""
        if state is None:
            return
        decoder = Decoder(dict(self._anchored[::-1]), _report)
        for root, sent in zip(self._roots, plain.unpack(state, placed=True), strict=True):
            decoder.put_attributes(root.value, root.name, sent)


@cache
def _report(name: str, why: str) -> None:
    log.warning(
        "%s is not restored after a fault: %s. If it changes from epoch to epoch, the order of the data may differ."
        " Keep numbers, tensors, arrays, generators and containers of these in a sampler.",
        name,
        why,
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
