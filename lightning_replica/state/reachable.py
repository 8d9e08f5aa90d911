"""What the user's objects hold, beside weights, buffers and states of optimizers: taken, put back, sent, put elsewhere.

The objects are the modules of the model, the user's callbacks and the data module, and all that they refer to:
counters, hidden states, lists that collect outputs, generators, an EMA of the weights. A rank that goes back to a
snapshot puts all of it back, so that a batch that is repeated finds it as it did the first time.

It may belong to one rank: the hidden state of a recurrent network differs from rank to rank. So what has changed since
training began is mirrored to the peers, for a replacement. What is too large for that (`LARGE_BYTES`, `MANY`) is
reported by name, and a replacement takes a peer's. What has not changed, the script of a replacement has built itself.

A tensor with a graph is restored without its graph. A graph that leads from one step into the next is not restored.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor, nn
from torchmetrics import Metric

from lightning_replica._compat.lightning_names import pl
from lightning_replica._compat.packages import is_of_lightning
from lightning_replica._compat.tree import Tree
from lightning_replica.core.points import PHASES
from lightning_replica.state.atoms import ATOMS, is_same_atom
from lightning_replica.state.objects.capture import Anchors, Capture, Recorder, Root, leads_of
from lightning_replica.state.objects.contents import Late
from lightning_replica.state.objects.kinds import Kind, kind_of
from lightning_replica.state.objects.records import Attributes, Slots
from lightning_replica.state.objects.wire import Decoder, Encoder

log = logging.getLogger(__name__)

LARGE_BYTES: Final = 4 * 2**20
MANY: Final = 1000  # objects


class _Bare(Metric):
    """A torchmetrics object with only the attributes that every such object has."""

    def update(self) -> None:
        """Update nothing."""

    def compute(self) -> None:
        """Compute nothing."""


# Attributes that are not the user's, or that other code restores: state/metrics.py restores a metric's declared states.
_OF_TORCH: Final = frozenset(vars(nn.Module()))
_OF_LIGHTNING: Final = frozenset(vars(pl.LightningModule()))
_OF_DATA: Final = frozenset(vars(pl.LightningDataModule()))
_OF_METRICS: Final = _OF_TORCH | frozenset(vars(_Bare()))


class Inexact:
    """Says once, by name, what is not restored exactly after a fault.

    Attributes:
        known: What has been said, by name.
    """

    def __init__(self) -> None:
        self.known: dict[str, str] = {}

    def report(self, name: str, why: str) -> None:
        """Say why something is not restored, unless that has been said."""
        if name not in self.known:
            self.known[name] = why
            log.warning("After a fault, this run is not exact in %s: %s.", name, why)

    def late(self, late: Late) -> None:
        """Say that a write was found late."""
        self.report(late.name, late.text)


@dataclass
class Taken:
    """What the user's objects held at one point.

    Attributes:
        capture: All of it.
        anchors: What has a name in every process.
        changed: By name of a root, the attributes that are not as they were when training began.
    """

    capture: Capture = field(default_factory=Capture)
    anchors: Anchors = field(default_factory=lambda: Anchors({}))
    changed: dict[str, frozenset[str]] = field(default_factory=dict)


class Reachable:
    """Takes what the user's objects hold, each time with what is the same of the time before.

    Args:
        trainer: The trainer, before training and before its sanity check, which a replacement does not run.
        inexact: Gets what is not restored exactly.
    """

    def __init__(self, trainer: pl.Trainer, inexact: Inexact) -> None:
        self._trainer, self._inexact = trainer, inexact
        self._recorder = Recorder(inexact.report)
        self._tree: Tree | None = None
        self._roots: list[Root] = []
        self._anchors = Anchors({})
        self._first: Capture | None = None
        self._last = Taken()
        module = trainer.lightning_module
        # A replacement loads no checkpoint, so what a checkpoint may have set counts as changed.
        self._all_changed = type(module).on_load_checkpoint is not pl.LightningModule.on_load_checkpoint
        self._first = self.take(Tree.of(module)).capture
        self._last = Taken()

    def take(self, tree: Tree, window: bool = True, whole: bool = False) -> Taken:
        """Return what the objects hold now.

        Args:
            tree: The tree of the module.
            window: Whether a window of batches begins.
            whole: Whether everything is compared, whatever its size.
        """
        if tree is not self._tree:
            self._tree = tree
            self._roots = list(_roots(self._trainer, tree))
            self._anchors = Anchors.of(_anchored(self._trainer))
        capture = self._recorder.take(self._roots, self._anchors, window, whole)
        if capture is not self._last.capture:
            self._last = Taken(capture, self._anchors, dict(self._changed(capture)))
        return self._last

    def put_back(self, taken: Taken) -> None:
        """Restore what `take` returned."""
        for name in taken.capture.put_back():
            self._inexact.report(name, "it has changed in the step that is repeated, and cannot be restored")
        self._recorder.forget()

    def put_sent(self, sent: list[Any]) -> None:
        """Put what another rank has sent into the objects of this one."""
        roots = {root.name: root.value for root in _roots(self._trainer, Tree.of(self._trainer.lightning_module))}
        anchored: dict[str, Any] = {}
        for name, value in _anchored(self._trainer):
            anchored.setdefault(name, value)
        decoder = Decoder(anchored, self._inexact.report)
        for name, attributes in sent:
            if name in roots:
                decoder.put_attributes(roots[name], name, attributes)
        self._recorder.forget()

    def whole(self, taken: Taken) -> list[Any]:
        """Return what has changed since training began, as plain data."""
        return self._encoded(taken, limited=False)

    def private(self, taken: Taken) -> list[Any]:
        """Return what has changed since training began and is mirrored, as plain data."""
        return self._encoded(taken, limited=True)

    def _encoded(self, taken: Taken, limited: bool) -> list[Any]:
        encoder = Encoder(taken.capture, taken.anchors, self._inexact.report, self._first)
        sizes = _Sizes(taken.capture)
        sent = []
        for root in taken.capture.roots:
            names = taken.changed.get(root.name, frozenset())
            if not names:
                continue
            record = taken.capture.attributes_of(root)
            if limited:
                large = {name for name in names if sizes.is_large(record, name)}
                for name in large:
                    self._inexact.report(
                        f"{root.name}.{name}",
                        "it is too large to be mirrored in every step, so a replaced rank takes that of a peer",
                    )
                names -= large
            if names:
                sent.append([root.name, encoder.attributes(record, names)])
        return sent

    def _changed(self, capture: Capture) -> Iterator[tuple[str, frozenset[str]]]:
        """Yield the names of the attributes that have changed since training began, root by root."""
        first = self._first
        if first is None:
            return
        moved = {key for key, record in capture.records.items() if first.records.get(key) is not record}
        before = {id(held.value): copy for held, copy in first.copies}
        moved |= {id(held.value) for held, copy in capture.copies if before.get(id(held.value)) is not copy}
        if not moved and not self._all_changed:
            return
        for root in capture.roots:
            record, known = capture.attributes_of(root), first.records.get(id(root.value))
            was = dict(zip(known.names, known.values, strict=True)) if isinstance(known, Attributes) else {}
            names = frozenset(
                name
                for name, value in zip(record.names, record.values, strict=True)
                if self._all_changed or name not in was or _has_moved(value, was[name], moved, capture)
            )
            if names:
                yield root.name, names


def _has_moved(now: Any, then: Any, moved: set[int], capture: Capture) -> bool:
    if now is not then and not (type(now) in ATOMS and is_same_atom(now, then)):
        return True
    return any(key in moved for key in _keys_under(now, capture))


def _keys_under(value: Any, capture: Capture) -> Iterator[int]:
    """Yield the keys of all objects that a value leads to."""
    ahead, seen = [value], set[int]()
    while ahead:
        here = ahead.pop()
        if id(here) in seen or kind_of(here) in (Kind.ATOM, Kind.CLOSED):
            continue
        seen.add(id(here))
        yield id(here)
        yield ~id(here)
        for key in (id(here), ~id(here)):
            if key in capture.records:
                ahead += [child for _, child in capture.records[key].children()]


class _Sizes:
    """Estimates how much the attributes of a capture take.

    Args:
        capture: The capture.
    """

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._bytes = {id(held.value): held.nbytes for held, _ in capture.copies}

    def is_large(self, record: Attributes, name: str) -> bool:
        """Return whether an attribute takes too much to be mirrored in every step."""
        value = record.values[record.names.index(name)]
        keys = list(_keys_under(value, self._capture))
        if len(keys) > 2 * MANY:
            return True
        size = sum(self._bytes.get(key, 0) for key in keys)
        size += sum(8 * _length(self._capture.records[key]) for key in keys if key in self._capture.records)
        size += sum(each.nbytes for key in keys if isinstance(each := self._content(key), Tensor))
        return size > LARGE_BYTES or any(
            _length(self._capture.records[key]) > MANY for key in keys if key in self._capture.records
        )

    def _content(self, key: int) -> Any:
        return getattr(self._capture.records.get(key), "content", None)


def _length(record: Any) -> int:
    return 0 if isinstance(record, (Attributes, Slots)) else len(getattr(record, "items", ()))


def _roots(trainer: pl.Trainer, tree: Tree) -> Iterator[Root]:
    module = trainer.lightning_module
    names = {id(each): name for name, each in module.named_modules()}
    for each in tree.modules:
        name = f"module.{names[id(each)]}" if names.get(id(each)) else "module"
        if each is module:
            yield Root(each, name, _OF_TORCH | _OF_LIGHTNING)
        elif isinstance(each, Metric):
            yield Root(each, name, _OF_METRICS | frozenset(each._defaults))
        else:
            yield Root(each, name, _OF_TORCH, leads_of(each, _OF_TORCH))
    for place, callback in enumerate(trainer.callbacks):  # type: ignore[attr-defined]
        if is_users(callback):
            yield Root(callback, f"callback {place} ({type(callback).__name__})")
    data: pl.LightningDataModule | None = trainer.datamodule  # type: ignore[attr-defined]
    if data is not None and is_users(data):
        yield Root(data, "datamodule", _OF_DATA)


def is_users(item: Any) -> bool:
    """Return whether an object is of a class of the user's. A callback that sees recoveries remembers them as well."""
    module = type(item).__module__
    foreign = is_of_lightning(module) or module.partition(".")[0] == "lightning_replica"
    sees = any(hasattr(item, hook) for hook in ("on_incident", *(f"on_recovery_{phase}" for phase in PHASES)))
    return not foreign and not sees


def _anchored(trainer: pl.Trainer) -> Iterable[tuple[str, Any]]:
    """Yield what has a name in every process, and whose content is restored by other code or is a root."""
    module = trainer.lightning_module
    yield from ((f"parameter {name}", each) for name, each in module.named_parameters())
    yield from ((f"buffer {name}", each) for name, each in module.named_buffers())
    yield from ((f"module {name}", each) for name, each in module.named_modules())
    yield from ((f"optimizer {place}", each) for place, each in enumerate(trainer.optimizers))
    for place, optimizer in enumerate(trainer.optimizers):
        trained = (each for group in optimizer.param_groups for each in group["params"])
        yield from ((f"parameter {number} of optimizer {place}", each) for number, each in enumerate(trained))
    for place, config in enumerate(trainer.lr_scheduler_configs):
        yield f"scheduler {place}", config.scheduler
    yield "trainer", trainer
    yield "strategy", trainer.strategy
    yield from ((f"logger {place}", each) for place, each in enumerate(trainer.loggers))
    yield from ((f"callback {place}", each) for place, each in enumerate(trainer.callbacks))  # type: ignore[attr-defined]
    yield "datamodule", trainer.datamodule  # type: ignore[attr-defined]
