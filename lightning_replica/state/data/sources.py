"""What a loader draws from, as far as it is the user's: samplers, datasets, collate functions, iterable objects.

torch's own samplers keep an epoch, which Lightning sets, a generator, which may be the user's, and weights or indices,
which hooks may change. Others shuffle a list in place, or draw from a generator of their own, each time they are
iterated; a dataset without workers counts what it was asked for; a stream goes on where its last epoch ended. Such
state is part of a loader's position, just as the random state of its process is.

[Note: what workers copy]
Workers get a copy of the dataset and its functions when they start. What hooks change in them later (``dataset.level``
in ``on_train_epoch_start``) reaches the workers that start in the next epoch. So workers that start again in the middle
of an epoch have to copy what was there when its iteration began.

Loading changes the copies: an augmentation has a generator of its own, a dataset counts what it was asked for. Of what
a worker has changed, it sends with the batch what takes little (workers.py), and reports the rest by name.

[Note: training objects]
A dataset or a collate function may refer to the module or the data module, and these lead to the trainer. The walk over
what a loader draws from stops there: the rank restores these objects itself. But workers have copies of them, whose
attributes count like those of the dataset. The weights in these copies are of the time when the workers started.
"""

import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.heap import BufferWrapper
from types import FunctionType, MappingProxyType, MethodType, SimpleNamespace
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from lightning_replica._compat.packages import is_of_lightning
from lightning_replica._compat.torch import _BaseDataLoaderIter
from lightning_replica.core import plain
from lightning_replica.core.inexact import Report, Scope, say_nothing, warn
from lightning_replica.core.user_code import UserCode, is_users_class
from lightning_replica.state.code_variables import MOST, variables_of
from lightning_replica.state.objects.capture import Anchors, Root
from lightning_replica.state.objects.kinds import OF_CLASSES, has_attributes, is_exchanged_only, slots_of
from lightning_replica.state.objects.tracked import LEFT_OUT, MIRRORED, Limits, Taken, Tracked, changed_between

_LIMITS: Final = MIRRORED._replace(
    why="it is too large to be kept with the position of its loader, and goes back to what it held in the beginning",
    scope="fault",
)
# Of torch's samplers, what other code restores or what is a source itself. Code may change the rest: weights, indices.
_OF_OTHERS: Final = frozenset(("data_source", "dataset", "sampler", "epoch"))
_OF_LOADERS: Final = frozenset(vars(DataLoader[Any](TensorDataset(torch.zeros(1))))) | {"_iterator"}
_FUNCTIONS: Final = (FunctionType, *OF_CLASSES)
_COPIED_BYTES: Final = 2**24  # of data; the rest is watched without copies
SENT_BYTES: Final = 2**18  # of all that a worker has changed; it goes with the batch, and into each snapshot
_SENT: Final = Limits(
    2**16,
    1000,
    "a worker of the loader has changed it, and it is too large to be kept with each batch: where the worker starts"
    " again, it is as in the beginning",
    "fault",
)


class TrainingObjects(NamedTuple):
    """What a training consists of beside its data. See [Note: training objects].

    Attributes:
        anchored: What has a name in every process of the job, with the names.
        owners: Objects of the user's among them, with the attributes that count.
    """

    anchored: Sequence[tuple[str, Any]] = ()
    owners: Sequence[Root] = ()


NO_TRAINING: Final = TrainingObjects()
"""For a loader outside of a training."""
NOTHING: Final[Mapping[str, frozenset[str]]] = MappingProxyType({})
"""For a loader in the first epoch."""


class Sources:
    """What a loader draws from, as far as the user's code may change it: samplers, and objects of the user's classes.

    Args:
        objects: What `sources_of` or `copied_by_workers` has found.
        report: Called with what is not restored exactly.
        training: What the walk stops at.
        changed: What loading was seen to change in the epoch before, where loaders are made anew.

    Attributes:
        changed_by_loading: Attributes of the training's objects, and variables of code, that loading changes, by name
            of their owner.
    """

    def __init__(
        self,
        objects: Iterable[Any],
        report: Report = warn,
        training: TrainingObjects = NO_TRAINING,
        changed: Mapping[str, frozenset[str]] = NOTHING,
    ) -> None:
        self.changed_by_loading = dict(changed)
        self._found = found = list(objects)
        roots = [_root_of(each, f"{type(each).__name__} of the loader") for each in found if _has_state(each)]
        if len({root.name for root in roots}) < len(roots):
            roots = [replace(root, name=f"{root.name}, {place}") for place, root in enumerate(roots)]
        rest = {f"{type(each).__name__}_{place}": each for place, each in enumerate(found) if not _has_state(each)}
        self._functions = [each for each in rest.values() if is_function(each)]
        if rest:  # what functions enclose and lists hold counts
            roots.append(Root(SimpleNamespace(**rest), "the loader"))
        self._own_roots = self._roots = roots
        self._anchored = [*training.anchored, *((root.name, root.value) for root in self._roots)]
        self._anchored += [(f"source {place}", each) for place, each in enumerate(found) if _has_state(each)]
        self._anchors = Anchors.of(self._anchored)
        self._tracked = Tracked(report, copied_bytes=_COPIED_BYTES)
        self._packed: tuple[Any, bytes] = None, b""
        self._loaded: Taken | None = None
        if self._roots:
            self._tracked.begin(self._roots, self._anchors)
        self._owners = list(self._owners_among(training.owners))
        self._owners += self._variables_to_follow()
        # What loading has changed held this before. A state of that time does not have it.
        self._initial: list[Any] = []
        self._owners_tracked = Tracked(say_nothing, copied_bytes=_COPIED_BYTES)
        self._unchanged: list[Root] = []
        if self._owners:
            self._divide_owners()

    def _variables_to_follow(self) -> list[Root]:
        """Return the variables that count like the owners' attributes: those which loading may change."""
        return [root for root in self._variables_used() if _may_change(root)]

    def _variables_used(self) -> list[Root]:
        """Return the variables that code of the sources uses: a generator in its file, a counter of its class."""
        if not self._found:
            return []
        objects = [root.value for root in (*self._own_roots, *self._owners)]
        return list(variables_of(UserCode(objects, filter(is_users_class, self._tracked.classes), self._functions)))

    def _owners_among(self, owners: Sequence[Root]) -> Iterator[Root]:
        """Yield the owners that the sources refer to. Who has a module may have found others through it."""
        referred = self._tracked.referred()
        has_module = any(id(root.value) in referred and isinstance(root.value, nn.Module) for root in owners)
        for root in owners:
            if id(root.value) in referred or (has_module and isinstance(root.value, nn.Module)):
                yield root

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Find out which attributes of the training's objects change in the block; from now on they count."""
        if not self._owners:
            yield
            return
        before = self._owners_tracked.take(self._unchanged, self._anchors)
        yield
        new = changed_between(before, self._owners_tracked.take(self._unchanged, self._anchors))
        if new:
            self._initial += self._owners_tracked.encoded(replace(before, changed=new))
            known = self.changed_by_loading
            self.changed_by_loading = {
                owner: known.get(owner, frozenset()) | new.get(owner, frozenset()) for owner in {*known, *new}
            }
            self._divide_owners()

    def begin_to_load(self) -> None:
        """Forget what was there after the last batch: another iteration begins."""
        self._loaded = None

    def note_loaded(self) -> None:
        """Note what is there after a batch was loaded."""
        self._leave_iterators()
        self._loaded = self._tracked.take(self._roots, self._anchors, window=False) if self._roots else None

    def changed_since_loaded(self) -> list[str]:
        """Return the names of what has changed since `note_loaded`."""
        if self._loaded is None:
            return []
        now = self._tracked.take(self._roots, self._anchors, window=False)
        return sorted(
            f"{owner}.{name}" for owner, names in changed_between(self._loaded, now).items() for name in names
        )

    def _divide_owners(self) -> None:
        """Count what loading is known to change as a part of the sources, and look for changes in the rest only."""
        self._roots = [*self._own_roots, *map(self._with_changed, self._owners)]
        self._unchanged = [*map(self._without_changed, self._owners)]

    def _without_changed(self, owner: Root) -> Root:
        known = self.changed_by_loading.get(owner.name, frozenset())
        if owner.only is None:
            return replace(owner, own=owner.own | known)
        return replace(owner, only=tuple(name for name in owner.only if name not in known))

    def _with_changed(self, owner: Root) -> Root:
        return replace(owner, only=tuple(sorted(self.changed_by_loading.get(owner.name, ()))))

    def _leave_iterators(self) -> None:
        """Leave out what an attribute of a loader holds once it iterates itself: the position says how far that is."""
        roots = [_without_iterators(root) if isinstance(root.value, DataLoader) else root for root in self._own_roots]
        if roots != self._own_roots:
            self._own_roots = self._roots = roots
            if self._owners:
                self._divide_owners()

    def state(self, begins: bool = True) -> bytes | None:
        """Return what has changed since the loader was made; None if there is nothing of the user's.

        Args:
            begins: Whether an iteration begins. Between two batches, less of what is large is compared.
        """
        if not self._roots:
            return None
        self._leave_iterators()
        taken = self._tracked.take(self._roots, self._anchors, begins)
        if self._packed[0] is not taken:
            # Not `mirrored`: the bytes of two states are compared.
            self._packed = taken, plain.pack(self._tracked.encoded(taken, _LIMITS))
        return self._packed[1]

    def put(self, state: bytes | None) -> None:
        """Restore what `state` returned."""
        if state is not None and self._roots:
            sent = plain.unpack(state, placed=True)
            has = {(owner, name) for owner, pairs in sent if owner != LEFT_OUT for name, _ in pairs}
            initial = [
                [owner, [pair for pair in pairs if (owner, pair[0]) not in has]] for owner, pairs in self._initial
            ]
            self._tracked.return_to_beginning()
            self._tracked.put_sent(self._roots, self._anchored, [*initial, *sent])

    def are(self, objects: Iterable[Any]) -> bool:
        """Return whether other objects, which were found later, are the same ones."""
        return [*map(id, objects)] == [*map(id, self._found)]


class Copied(Sources):
    """What workers copy when they start: the dataset, and the functions that they call.

    In a worker, also the variables that their code uses: what changes in those of the rank's process goes back with
    the rank's other objects.

    Args:
        objects: What `copied_by_workers` has found.
        report: Called with what is not restored exactly.
        training: What the walk stops at, unless workers have copies of it.

    Attributes:
        has_weights: Whether workers have copies of the model.
    """

    def __init__(self, objects: Iterable[Any], report: Report = warn, training: TrainingObjects = NO_TRAINING) -> None:
        self._report = _Report(report)
        super().__init__(objects, self._report, training)
        self.has_weights = any(isinstance(root.value, nn.Module) for root in self._owners)
        if self._owners:
            self._roots = [*self._own_roots, *self._owners]
            self._tracked.begin(self._roots, self._anchors)
        self._in_worker, self._variables = self._tracked, Tracked(self._report, copied_bytes=_COPIED_BYTES)
        self._variable_roots = self._variables_used()
        self._variables.begin(self._variable_roots, self._anchors)
        self._leave_shared_memory()
        self._sent: tuple[Any, bytes | None] = (), None

    def _variables_to_follow(self) -> list[Root]:
        return []  # workers have variables of their own

    def _leave_shared_memory(self) -> None:
        """Keep workers from what all processes share: what one of them restored would change it for the others."""
        shared = [each for each in (*self._tracked.values(), *self._variables.values()) if _is_shared(each)]
        self._anchored_in_worker = [*self._anchored, *((f"shared {place}", each) for place, each in enumerate(shared))]
        self._anchors_in_worker = Anchors.of(self._anchored_in_worker)
        if shared:
            self._in_worker = Tracked(self._report, copied_bytes=_COPIED_BYTES)
            self._in_worker.begin(self._roots, self._anchors_in_worker)
            self._variables.begin(self._variable_roots, self._anchors_in_worker)
        else:
            self._anchors_in_worker = self._anchors

    def state_at_start(self) -> bytes | None:
        """Return what has changed since the fit began, also in the variables; called when workers start."""
        if not self._found:
            return None
        taken = [each.take(roots, self._anchors_in_worker) for each, roots in self._followed()]
        return plain.pack([each.encoded(now, _LIMITS) for now, (each, _) in zip(taken, self._followed(), strict=True)])

    @contextmanager
    def holding(self, state: bytes | None) -> Iterator[None]:
        """Restore, in the block, what `state_at_start` returned, but for the variables."""
        if state is None or state == self.state_at_start():
            yield
            return
        now = self._in_worker.take(self._roots, self._anchors_in_worker)
        self._in_worker.return_to_beginning()
        self._in_worker.put_sent(self._roots, self._anchored_in_worker, plain.unpack(state, placed=True)[0])
        try:
            yield
        finally:
            self._in_worker.put_back(now)

    def put_variables(self, state: bytes | None) -> None:
        """Restore, in a worker, the variables that `state_at_start` returned."""
        if state is not None:
            self._variables.return_to_beginning()
            self._variables.put_sent(self._variable_roots, self._anchored_in_worker, plain.unpack(state)[1])

    def begin_in_worker(self) -> None:
        """Keep what is to be reported for `reports`."""
        self._report.kept = []

    def state_in_worker(self) -> bytes | None:
        """Return, in a worker, what has changed since the fit began and takes little; None if nothing has."""
        taken = [each.take(roots, self._anchors_in_worker) for each, roots in self._followed()]
        if [*map(id, taken)] != [*map(id, self._sent[0])]:
            sent = [each.encoded(now, _SENT) for now, (each, _) in zip(taken, self._followed(), strict=True)]
            self._sent = taken, plain.pack(sent) if any(sent) else None
            if len(self._sent[1] or b"") > SENT_BYTES:
                self._report("what workers of the loader change", _SENT.why, _SENT.scope)
                self._sent = taken, None
        return self._sent[1]

    def return_to_beginning(self) -> None:
        """Restore, in a worker, what there was when the fit began."""
        for tracked, _ in self._followed():
            tracked.return_to_beginning()

    def put_in_worker(self, state: bytes | None) -> None:
        """Restore what `state_in_worker` returned, in a worker that has returned to the beginning.

        What its ``worker_init_fn`` has set and cannot be sent, as a file that it has opened, stays as it is.
        """
        if state is not None:
            for sent, (tracked, roots) in zip(plain.unpack(state), self._followed(), strict=True):
                tracked.put_sent(roots, self._anchored_in_worker, sent)

    def _followed(self) -> tuple[tuple[Tracked, list[Root]], ...]:
        return (self._in_worker, self._roots), (self._variables, self._variable_roots)

    def reports(self) -> list[tuple[str, str, Scope]]:
        """Return what was to be reported in this worker since the last call."""
        found, self._report.kept = self._report.kept or [], []
        return found


class _Report:
    """A report that can be kept: a worker has no way to the rank's."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self.kept: list[tuple[str, str, Scope]] | None = None
        self._known = set[tuple[str, str, Scope]]()

    def __call__(self, name: str, why: str, scope: Scope = "fault") -> None:
        found = name, why, scope
        if self.kept is None:
            self._report(*found)
        elif found not in self._known:
            self._known.add(found)
            self.kept.append(found)


def _may_change(root: Root) -> bool:
    """Return whether one of the variables is more than a function or a class, which loading seldom exchanges."""
    values = [value for name, value in vars(root.value).items() if root.follows(name)]
    return any(
        not (is_exchanged_only(each) if issubclass(type(each), _FUNCTIONS) else issubclass(type(each), type))
        for each in values
    )


def _is_shared(value: Any) -> bool:
    """Return whether a tensor, an array or an object of ctypes lies in memory that processes share."""
    while isinstance(value, np.ndarray) and value.base is not None:
        value = value.base
    if isinstance(value, Tensor):
        return value.layout is torch.strided and value.is_shared()
    if isinstance(value, memoryview):
        value = value.obj
    return isinstance(value, mmap.mmap) or isinstance(getattr(value, "_wrapper", None), BufferWrapper)


def copied_by_workers(loader: Any) -> list[Any]:
    """Return what workers copy when they start: the dataset and the functions that they call."""
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return []
    found = (loader.dataset, *_datasets_in(loader.dataset), loader.collate_fn, loader.worker_init_fn)
    return list({id(each): each for each in found if each is not None}.values())


def is_function(value: Any) -> bool:
    """Return whether a value is a function of Python, or a method or a partial of one."""
    return isinstance(value, (FunctionType, MethodType, partial))


def sources_of(loader: Any) -> Iterator[Any]:
    """Yield what a loader draws from in this process, and the loader itself if its class is the user's."""
    ahead = [loader] if not isinstance(loader, DataLoader) or not _is_known(loader) else []
    ahead += [getattr(loader, name, None) for name in ("sampler", "batch_sampler")]
    if isinstance(loader, DataLoader) and not loader.num_workers:  # else each worker has copies of its own
        ahead += [loader.dataset, *_datasets_in(loader.dataset), loader.collate_fn]
    seen: set[int] = set()
    while ahead:
        source = ahead.pop(0)
        if source is None or id(source) in seen:
            continue
        seen.add(id(source))
        yield source
        if _may_sample(source) or hasattr(source, "__iter__"):
            held = vars(source).values() if has_attributes(source) else ()
            ahead += [each for value in held for each in _samplers_in(value)]


def _datasets_in(dataset: Any) -> Iterator[Any]:
    """Yield the datasets that torch's wrappers have inside of them, as `Subset` and `ConcatDataset` do."""
    if isinstance(dataset, Dataset) and _is_known(dataset):
        for name, value in vars(dataset).items():
            for item in _items_of(value):
                if isinstance(item, Dataset) or name == "dataset":
                    yield item
                    yield from _datasets_in(item)


def _is_known(source: Any) -> bool:
    """Return whether the class of a source is torch's, Lightning's or this package's."""
    module = type(source).__module__
    return is_of_lightning(module) or module.partition(".")[0] in ("torch", "builtins", "lightning_replica")


def _root_of(source: Any, name: str) -> Root:
    """Return where the walk over a source begins, without what other code restores or is a source itself."""
    if isinstance(source, DataLoader):
        of_lightning = {each for each in vars(source) if each.startswith("__")}  # how the loader was made
        return Root(source, name, own=_OF_LOADERS | of_lightning, most=MOST)
    return Root(source, name, own=_OF_OTHERS if _is_known(source) else frozenset())


def _without_iterators(root: Root) -> Root:
    found = {name for name, value in vars(root.value).items() if isinstance(value, _BaseDataLoaderIter)}
    return root if found <= root.own else replace(root, own=root.own | found)


def _has_state(source: Any) -> bool:
    """Return whether a source has attributes that are not restored by others; of torch's, samplers and datasets do.

    If not, as for a function, a list or an object with slots, the source is what an attribute of "the loader" holds.
    """
    if is_function(source) or not has_attributes(source) or (slots_of(type(source)) and not _is_known(source)):
        return False
    return isinstance(source, (Sampler, Dataset)) or not _is_known(source)


def _samplers_in(value: Any) -> list[Any]:
    """Return what may be samplers of what a sampler keeps under some name."""
    return [each for each in _items_of(value) if _may_sample(each)]


def _items_of(value: Any) -> Iterable[Any]:
    """Return what an attribute holds: the items of a container, or the value alone."""
    if type(value) is dict:
        return value.values()
    return value if type(value) in (list, tuple) else (value,)


def _may_sample(value: Any) -> bool:
    """Return whether this may be a sampler inside of another one; Lightning wraps a sampler as if it were a dataset."""
    return isinstance(value, Sampler) or type(value).__name__ == "_DatasetSamplerWrapper"
