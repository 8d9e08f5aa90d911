"""What the user's objects hold, beside weights, buffers and states of optimizers: taken, put back, sent, put elsewhere.

The objects are the modules of the model, the user's callbacks and the data module, and all that they refer to:
counters, hidden states, lists that collect outputs, generators, an EMA of the weights. A rank that goes back to a
snapshot puts all of it back, so that a batch that is repeated finds it as it did the first time.

It may belong to one rank: the hidden state of a recurrent network differs from rank to rank. So what has changed since
training began is mirrored to the peers, for a replacement. What is too large for that (limits in `objects.tracked`) is
reported by name, and a replacement takes a peer's. What has not changed, the script of a replacement has built itself.

A tensor with a graph is restored without its graph. A graph that leads from one step into the next is not restored.
"""

import functools
import inspect
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Final

from torch import Tensor, nn
from torchmetrics import Metric

from lightning_replica._compat.lightning import OF_TRAINER, SETTINGS_OF_TRAINER
from lightning_replica._compat.lightning_names import Accelerator, pl
from lightning_replica._compat.packages import is_of_lightning
from lightning_replica._compat.torch import is_wrapper
from lightning_replica._compat.tree import Tree
from lightning_replica.core.inexact import Report, say_nothing, warn
from lightning_replica.core.points import PHASES
from lightning_replica.core.user_code import UserCode, is_of_framework, is_users_class, is_users_file
from lightning_replica.sharding.engine import OF_PARAMETERS, Watch, watch_of
from lightning_replica.state.atoms import ATOMS
from lightning_replica.state.code_variables import CLASS, GLOBALS, Environment, variables_of
from lightning_replica.state.data.in_loops import training_loaders, validation_loaders
from lightning_replica.state.data.position import ExactLoader
from lightning_replica.state.data.sources import TrainingObjects, sources_of
from lightning_replica.state.hooks import HookObjects, names_of
from lightning_replica.state.objects.capture import Anchors, Capture, Recorder, Root, leads_of
from lightning_replica.state.objects.contents import COPIED_BYTES
from lightning_replica.state.objects.signature import Signature, differences, signature_of
from lightning_replica.state.objects.tracked import Taken, Tracked
from lightning_replica.state.param_groups import GroupObjects


class _Bare(Metric):
    """A torchmetrics object with only the attributes that every such object has."""

    def update(self) -> None:
        """Update nothing."""

    def compute(self) -> None:
        """Compute nothing."""


# By properties, and by `toggle_optimizer`.
_USER_SETS: Final = {
    *("_automatic_optimization", "_strict_loading", "_example_input_array", "_param_requires_grad_state"),
}
# Attributes that are not the user's, or that other code restores: state/metrics.py restores a metric's declared states.
_OF_TORCH: Final = frozenset(vars(nn.Module()))
_OF_LIGHTNING: Final = frozenset(vars(pl.LightningModule())) - _USER_SETS
_OF_DATA: Final = frozenset(vars(pl.LightningDataModule()))
_OF_TENSORS: Final = frozenset((*OF_PARAMETERS, "grad", "requires_grad", "persistent", "_is_buffer"))
_PLAIN: Final = (Tensor, nn.Parameter)
GRADIENTS_BYTES: Final = 2**24  # of parameters in no optimizer; those that take more do not go back
_HOOKS: Final = "hooks of "
SAVED_HOOKS: Final = "hooks"  # no root is called so
_NO_STATE: Final = (Accelerator,)  # it stands for devices, which no rollback moves
_FUNCTIONS_OF_TORCH: Final = ("lr_lambdas", "_scale_fn_custom", "_scale_fn_ref")  # attributes of schedulers
_TABLES: Final = {pl.callbacks.LearningRateMonitor: ("lrs", "last_momentum_values", "last_weight_decay_values")}
_ALL_TABLES: Final = frozenset(name for names in _TABLES.values() for name in names)
_LOGGING: Final = frozenset(("log", "log_dict"))  # which Lightning gives to callbacks
# Settings of metrics, which code may change; what they compute goes back by state/metrics.py.
_FLAGS_OF_METRICS: Final = frozenset(
    (
        *("compute_on_cpu", "compute_with_cache", "dist_sync_fn", "dist_sync_on_step", "sync_on_compute"),
        *("distributed_available_fn", "_to_sync", "_should_unsync", "_enable_grad"),
    )
)
_OF_METRICS: Final = _OF_TORCH | (frozenset(vars(_Bare())) - _FLAGS_OF_METRICS)


class Reachable:
    """Takes what the user's objects hold, each time with what is the same of the time before.

    Args:
        trainer: The trainer, before training and before its sanity check, which a replacement does not run.
        report: Called with what is not restored exactly.
    """

    def __init__(self, trainer: pl.Trainer, report: Report) -> None:
        self._trainer, self._report = trainer, report
        self._callbacks = list[Any](trainer.callbacks)  # type: ignore[attr-defined]  # code may change the trainer's
        self._tree: Tree | None = None
        self._seen: list[Any] = []
        self._roots: list[Root] = []
        self._variables = _Variables(report)
        self._hooks, self._groups = HookObjects(), GroupObjects()
        self._held: list[Any] = []
        self._anchors = Anchors({})
        self._saved_hooks: dict[str, str] | None = None
        module = trainer.lightning_module
        # A replacement loads no checkpoint, so what a checkpoint may have set counts as changed.
        loads = type(module).on_load_checkpoint is not pl.LightningModule.on_load_checkpoint
        self._tracked = Tracked(report, all_changed=loads)
        self._look(Tree.of(module))
        self._tracked.begin(self._roots, self._anchors)
        known = _names_of(self._roots)
        self._variables.learn(self._tracked.classes, self._tracked.functions, self._tracked.modules)
        self._tree = None
        self._look(Tree.of(module))
        if _names_of(self._roots) != known:  # the code of these objects and functions leads to more variables
            self._tracked.begin(self._roots, self._anchors)

    def _look(self, tree: Tree) -> None:
        loaders = _loaders(self._trainer)
        sizes = [len(group["params"]) for each in self._trainer.optimizers for group in each.param_groups]
        marked = [id(each) for each in (*tree.parameters, *tree.buffers.values()) if each.__dict__ and _is_marked(each)]
        marked += [id(each) for each in tree.buffers.values() if _is_trained_by_hand(each)]
        of_rank = [watch.of_rank() for _, _, watch in _watched(self._trainer)]
        self._report_both()
        self._hooks.look(self._trainer.lightning_module, tree)
        self._groups.look(self._trainer)
        schedulers = [id(config.scheduler) for config in self._trainer.lr_scheduler_configs]
        held = [*_groups_of(self._trainer), *self._trainer.strategy._lightning_optimizers]
        late = self._variables.imported()
        seen = [loaders, marked, sizes, of_rank, schedulers, [*map(id, held)], late]
        if tree is not self._tree or seen != self._seen:
            self._tree, self._seen, self._held = tree, seen, held
            self._roots = [*_roots(self._trainer, tree, self._callbacks), *self._roots_beside(tree)]
            self._anchors = Anchors.of(_anchored(self._trainer, self._callbacks))

    def _roots_beside(self, tree: Tree) -> list[Root]:
        holders = [Root(self._hooks.holder, "hook"), Root(self._groups.holder, "param groups")]
        return [*holders, *self._variables.of(self._trainer, tree)]

    def _report_both(self) -> None:
        for name, _, watch in _watched(self._trainer):
            for attribute in watch.of_both:
                why = "updates and other code write to it; what other code has written does not go back with a batch"
                self._report(f"{name}.{attribute}", why)

    def take(self, tree: Tree, window: bool = True, whole: bool = False) -> Taken:
        """Return what the objects hold now.

        Args:
            tree: The tree of the module.
            window: Whether a window of batches begins.
            whole: Whether everything is compared, whatever its size.
        """
        self._look(tree)
        if window and self._saved_hooks is not None:  # now hooks of Lightning have registered the user's, too
            self._compare_hooks(self._saved_hooks)
            self._saved_hooks = None
        self._variables.environment.look()
        return self._tracked.take(self._roots, self._anchors, window, whole)

    def put_back(self, taken: Taken) -> None:
        """Restore what `take` returned; nothing if it took nothing, as for a step that this process has not seen."""
        if not taken.capture.roots:
            return
        known = {id(root.value) for root in taken.capture.roots}
        tree = Tree.of(self._trainer.lightning_module)
        for each in (*tree.parameters, *tree.buffers.values()):
            if id(each) not in known and _is_marked(each):  # since then
                for name in vars(each).keys() - _OF_TENSORS:
                    delattr(each, name)
        for each in tree.buffers.values():
            if id(each) not in known and _is_trained_by_hand(each):  # since then
                each.requires_grad_(False).grad = None
        for name, _, watch in _watched(self._trainer):
            for attribute in watch.new:
                why = "it was written to for the first time in the batch that is done again, and this does not go back"
                self._report(f"{name}.{attribute}", why, "once")
        for module in self._variables.imported_since(known):
            why = "it was imported in the batch that is done again, and its variables do not go back"
            self._report(f"{GLOBALS}{module.__name__}", why, "once")
        self._variables.environment.look()
        self._tracked.put_back(taken)
        self._variables.environment.put(self._report)
        self._groups.put(self._trainer)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restore, at the end of the block, what the objects held at its beginning."""
        held, _ = _all_of(self._trainer)
        yield
        held.put_back(self._report)

    def put_sent(self, sent: list[Any]) -> None:
        """Put what another rank has sent, or a checkpoint holds, into the objects of this one."""
        self._saved_hooks = next((dict(pairs) for name, pairs in sent if name == SAVED_HOOKS), self._saved_hooks)
        sent = [each for each in sent if each[0] != SAVED_HOOKS]
        for name, _, watch in _watched(self._trainer):
            watch.add(attribute for root, pairs in sent if root == name for attribute, _ in pairs)
        tree = Tree.of(self._trainer.lightning_module)
        roots = (*_roots(self._trainer, tree, self._callbacks, all_tensors=True), *self._roots_beside(tree))
        self._variables.environment.look()
        self._hooks.look(self._trainer.lightning_module, tree)
        self._groups.look(self._trainer)
        self._tracked.put_sent(roots, _anchored(self._trainer, self._callbacks), sent)
        self._variables.environment.put(self._report)
        self._groups.put(self._trainer)

    def signature(self, taken: Taken) -> Signature:
        """Return a signature of what has not changed since training began: what refers to what, without contents.

        It is the same on all ranks, but for what a script makes on some only (`state.builds`).
        """
        changed = {f"{root}.{name}" for root, names in taken.changed.items() for name in names}
        found = signature_of(taken.capture, taken.anchors, contents=False)
        # What variables refer to may differ between ranks from the start: `if rank == 0: RUN = ...`.
        left = (*changed, *(each for each in found if each.startswith((GLOBALS, CLASS))))
        found = {name: digest for name, digest in found.items() if name not in left}
        hooks = names_of(self._trainer.lightning_module, taken.capture.tensors())
        return found | {_HOOKS + name: names for name, names in hooks.items()}

    def compare(self, taken: Taken, expected: Signature) -> None:
        """Report where this replacement is built otherwise than ``expected``."""
        own = self.signature(taken)
        for name in differences(own, expected):
            if name.startswith(_HOOKS):
                local, others = own.get(name, "none"), expected.get(name, "none")
                self._report(
                    name, f"in this replacement there are other ones ({local}) than on other ranks ({others})", "once"
                )
            elif name in own and name in expected:
                self._report(name, "in this replacement it refers to something else than on the other ranks", "once")

    def _compare_hooks(self, saved: Mapping[str, str]) -> None:
        """Report where other hooks are registered than when the checkpoint was written."""
        now = names_of(self._trainer.lightning_module)
        for name in differences(now, saved):
            present, former = now.get(name, "none"), saved.get(name, "none")
            why = f"in this run there are other ones ({present}) than when its checkpoint was written ({former})"
            self._report(_HOOKS + name, why, "once")

    def whole(self, taken: Taken) -> list[Any]:
        """Return what has changed since training began, as plain data."""
        return self._tracked.encoded(taken)

    def begin_to_save(self, taken: Taken) -> None:
        """Leave out of `saved` what is as in ``taken``: what hooks have set before the first batch."""
        self._tracked.begin_to_save(taken)

    def saved(self, taken: Taken) -> list[Any]:
        """Return what belongs in a checkpoint, as plain data."""
        hooks = names_of(self._trainer.lightning_module)
        named = [[SAVED_HOOKS, [list(each) for each in hooks.items()]]] if hooks else []
        return [*self._without_settings(self._tracked.saved(taken)), *named]

    def _without_settings(self, sent: Iterable[Any]) -> Iterator[list[Any]]:
        """Leave out what the script of a run that resumes decides: settings of the trainer, and of its callbacks."""
        settings = {root.name: root.only or () for root in self._roots if isinstance(root.value, pl.Callback)}
        settings["trainer"] = tuple(SETTINGS_OF_TRAINER)
        for root, pairs in sent:
            left = settings.get(root, ())
            if not left:
                yield [root, pairs]
                continue
            for name, _ in pairs:
                if name in left and name not in _ALL_TABLES:  # a run that resumes begins them anew, as under DDP
                    why = "code has changed it in training, and a run that resumes has what its script gives it"
                    self._report(f"{root}.{name}", why, "resume")
            kept = [pair for pair in pairs if pair[0] not in left]
            if kept:
                yield [root, kept]

    def private(self, taken: Taken) -> list[Any]:
        """Return what has changed since training began and is mirrored, as plain data."""
        return self._tracked.mirrored(taken)


@dataclass(frozen=True)
class Survey:
    """All that the user's objects lead to before training, without contents.

    Attributes:
        capture: What they lead to.
        anchors: What has a name in every process.
    """

    capture: Capture
    anchors: Anchors

    @classmethod
    def of(cls, trainer: pl.Trainer) -> "Survey":
        """Look at the objects of the user's of a trainer."""
        return cls(*_all_of(trainer, copied_bytes=0, report=say_nothing))

    @property
    def classes(self) -> set[type]:
        """The classes of all objects."""
        return {type(record.value) for record in self.capture.records.values()}

    def functions(self) -> Iterator[Any]:
        """Yield the functions that objects hold."""
        return self.capture.functions()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors that have no other name, with their names."""
        met: set[int] = set()
        for name, child in self.capture.children():
            if isinstance(child, Tensor) and id(child) not in self.anchors.names and id(child) not in met:
                met.add(id(child))
                yield name, child


def signature_of_all(trainer: pl.Trainer) -> Signature:
    """Return a signature of all that the user's objects hold now, with contents."""
    return signature_of(*_all_of(trainer), contents=True)


def _all_of(trainer: pl.Trainer, copied_bytes: int = COPIED_BYTES, report: Report = warn) -> tuple[Capture, Anchors]:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    anchors, roots = anchors_of(trainer), list(_roots(trainer, Tree.of(trainer.lightning_module), callbacks))
    return Recorder(report, copied_bytes).take(roots, anchors), anchors


def _is_marked(tensor: Tensor) -> bool:
    """Return whether user code has given attributes to a parameter or a buffer. Those of a wrapper are its parts."""
    return not _is_wrapper(tensor) and not vars(tensor).keys() <= _OF_TENSORS


def _is_trained_by_hand(buffer: Tensor) -> bool:
    """Return whether a buffer may have a gradient, as an adversarial perturbation has."""
    return buffer.requires_grad and buffer.is_leaf and not _is_wrapper(buffer)


def _is_wrapper(tensor: Tensor) -> bool:
    return type(tensor) not in _PLAIN and (hasattr(type(tensor), "__tensor_flatten__") or is_wrapper(tensor))


class _Variables:
    """Finds variables of the user's code again where the classes of the user's objects are others than before."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._classes: dict[type, None] = {}
        self._learnt: list[type] = []
        self._functions: list[Any] = []
        self._modules: list[ModuleType] = []
        self._imported = set(sys.modules)
        self._late: list[ModuleType] = []
        self._known: Any = None
        self._roots: list[Root] = []
        self.environment = Environment()

    def learn(self, classes: Iterable[type], functions: Iterable[Any], modules: Iterable[ModuleType]) -> None:
        """Follow the code of further classes and functions, too, and all variables of some modules of Python."""
        self._learnt = [cls for cls in filter(is_users_class, classes) if cls not in self._classes]
        self._functions = list({id(each): each for each in functions}.values())
        self._modules = list(dict.fromkeys(modules))

    def imported_since(self, known: Collection[int]) -> list[ModuleType]:
        """Return the modules that were imported in training and that a capture does not have.

        Args:
            known: The ``id`` of what the capture has.
        """
        self.imported()
        return [module for module in self._late if id(module) not in known and _has_variables(module)]

    def imported(self) -> int:
        """Follow modules of the user's that were imported since the last call, and return how many there are."""
        if len(sys.modules) != len(self._imported):
            new = [name for name in list(sys.modules) if name not in self._imported]
            found = (sys.modules.get(name) for name in new if not is_of_framework(name))
            self._late += [module for module in found if module and is_users_file(getattr(module, "__file__", None))]
            self._imported = set(sys.modules)
        return len(self._late)

    def of(self, trainer: pl.Trainer, tree: Tree) -> list[Root]:
        """Return where the walk over them begins."""
        objects = _objects_of(trainer)
        owners = (*tree.modules, *objects, *trainer.optimizers)
        classes = dict.fromkeys((*map(type, owners), *self._learnt))  # in the same order in every process of a job
        modules = list(dict.fromkeys((*self._modules, *self._late)))
        known = classes, [*map(id, self._functions)], [*map(id, modules)]
        if known != self._known:
            code = UserCode(objects, classes, self._functions, modules, without=_NO_STATE)
            self._known = known
            self._classes, self._roots = classes, [*variables_of(code), *self.environment.of(code)]
            for each in code.appending:
                why = "it appends to a file: what it writes in a batch that is done again is there twice"
                self._report(each, why, "unknown")
            if code.problem:
                self._report("variables of your code", f"{code.problem}, so what changes in some does not go back")
        return self._roots


def _has_variables(module: ModuleType) -> bool:
    """Return whether a module has variables that its code may change: not only functions, classes and constants."""
    code = UserCode((), modules=[module])
    values = {name: vars(module).get(name) for name in code.names.get(module.__name__, ())}
    constant = (FunctionType, BuiltinFunctionType, type, ModuleType)
    return any(
        name in code.written or not (type(value) in ATOMS or isinstance(value, constant))
        for name, value in values.items()
    )


def _groups_of(trainer: pl.Trainer) -> Iterator[Any]:
    """Yield the lists of param groups, and the groups."""
    for optimizer in trainer.optimizers:
        yield optimizer.param_groups
        yield from optimizer.param_groups


def _names_of(roots: Iterable[Root]) -> list[Any]:
    """Return what is followed."""
    return [(root.name, root.only) for root in roots]


def _objects_of(trainer: pl.Trainer) -> list[Any]:
    """Return the objects of the user's whose methods Lightning calls."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    data: pl.LightningDataModule | None = trainer.datamodule  # type: ignore[attr-defined]
    return [trainer.lightning_module, *filter(is_users, (*callbacks, *([] if data is None else [data])))]


def _untrained(trainer: pl.Trainer) -> set[int]:
    """Return the ``id`` of each parameter that gets gradients and is in no optimizer; none if they take too much."""
    groups = (group for optimizer in trainer.optimizers for group in optimizer.param_groups)
    trained = {id(parameter) for group in groups for parameter in group["params"]}
    left = [each for each in trainer.lightning_module.parameters() if each.requires_grad and id(each) not in trained]
    return set(map(id, left)) if sum(each.nbytes for each in left) <= GRADIENTS_BYTES else set()


def _roots(trainer: pl.Trainer, tree: Tree, callbacks: Iterable[Any], all_tensors: bool = False) -> Iterator[Root]:
    module = trainer.lightning_module
    untrained = _untrained(trainer)
    for name, tensor in module.named_parameters():
        if _is_wrapper(tensor):
            continue
        if id(tensor) in untrained:  # the gradient is the user's, too
            yield Root(tensor, f"module.{name}", _OF_TENSORS - {"grad"})
        elif all_tensors or _is_marked(tensor):
            yield Root(tensor, f"module.{name}", _OF_TENSORS)
    for name, buffer in module.named_buffers():
        if not _is_wrapper(buffer) and (all_tensors or _is_marked(buffer) or _is_trained_by_hand(buffer)):
            yield Root(buffer, f"module.{name}", _OF_TENSORS - {"grad", "requires_grad"})
    names = {id(each): name for name, each in module.named_modules()}
    for each in tree.modules:
        name = f"module.{names[id(each)]}" if names.get(id(each)) else "module"
        if each is module:
            yield Root(each, name, _OF_TORCH | _OF_LIGHTNING)
        elif isinstance(each, Metric):
            yield Root(each, name, _OF_METRICS | frozenset(each._defaults))
        else:
            yield Root(each, name, _OF_TORCH, leads_of(each, _OF_TORCH))
    # Counted without those of this package and of Lightning, which a run that is compared with this one may not have.
    for place, callback in enumerate(each for each in callbacks if is_users(each)):
        yield Root(callback, f"callback {place} ({type(callback).__name__})", _LOGGING)
    for place, callback in enumerate(each for each in callbacks if is_of_lightning(type(each).__module__)):
        if not is_users(callback):
            cls: Any = type(callback)
            yield Root(callback, f"{cls.__name__} {place}", only=(*_settings_of(cls), *_tables_of(cls)))
    data: pl.LightningDataModule | None = trainer.datamodule  # type: ignore[attr-defined]
    if data is not None and is_users(data):
        yield Root(data, "datamodule", _OF_DATA)
    for name, optimizer, watch in _watched(trainer):
        yield Root(optimizer, name, only=watch.of_rank())
    yield Root(trainer, "trainer", OF_TRAINER - SETTINGS_OF_TRAINER)
    yield from _schedulers(trainer)


@functools.cache
def _settings_of(cls: type[pl.Callback]) -> tuple[str, ...]:
    """Return the names of a callback's settings: its attributes that have the name of a parameter of its class."""
    return tuple(name for name in inspect.signature(cls.__init__).parameters if name != "self")


def _tables_of(cls: type[pl.Callback]) -> tuple[str, ...]:
    """Return the names of attributes in which a callback of Lightning's keeps what it has seen, beside its state."""
    return next((names for each, names in _TABLES.items() if issubclass(cls, each)), ())


def _watched(trainer: pl.Trainer) -> Iterator[tuple[str, Any, Watch]]:
    """Yield the optimizers that are sharded, with their names and what finds out which attributes are the rank's."""
    for place, optimizer in enumerate(trainer.optimizers):
        watch = watch_of(optimizer)
        if watch is not None:
            yield f"optimizer {place}", optimizer, watch


def _schedulers(trainer: pl.Trainer) -> Iterator[Root]:
    """Yield the user's schedulers, and of torch's the functions that they call, which are in no ``state_dict``."""
    ahead = [(f"scheduler {place}", config.scheduler) for place, config in enumerate(trainer.lr_scheduler_configs)]
    while ahead:
        name, scheduler = ahead.pop()
        yield (
            Root(scheduler, name) if is_users_scheduler(scheduler) else Root(scheduler, name, only=_FUNCTIONS_OF_TORCH)
        )
        inner = getattr(scheduler, "_schedulers", ())  # of a scheduler that goes through others in turn
        ahead += [(f"{name}.{place}", each) for place, each in enumerate(inner)]


def is_users_scheduler(scheduler: Any) -> bool:
    """Return whether a scheduler is of a class of the user's: it goes back, and travels, as the user's objects do."""
    module = type(scheduler).__module__
    return hasattr(scheduler, "__dict__") and not is_of_lightning(module) and module.partition(".")[0] != "torch"


def is_users(item: Any) -> bool:
    """Return whether an object is the user's. A callback that sees recoveries remembers them as well.

    Of a ``LambdaCallback``, the functions are.
    """
    module = type(item).__module__
    of_lightning = is_of_lightning(module) and not isinstance(item, pl.callbacks.LambdaCallback)
    foreign = of_lightning or module.partition(".")[0] == "lightning_replica"
    sees = any(hasattr(item, hook) for hook in ("on_incident", *(f"on_recovery_{phase}" for phase in PHASES)))
    return not foreign and not sees


def training_objects(trainer: pl.Trainer) -> TrainingObjects:
    """Return what a training consists of beside its data."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    roots = _roots(trainer, Tree.of(trainer.lightning_module), callbacks)
    of_data = (nn.Module, pl.LightningDataModule, pl.Callback)
    return TrainingObjects(
        list(_anchored_beside_data(trainer, callbacks)), [each for each in roots if isinstance(each.value, of_data)]
    )


def anchors_of(trainer: pl.Trainer) -> Anchors:
    """Return what has a name in every process, and whose content is restored by other code or is a root."""
    return Anchors.of(_anchored(trainer, trainer.callbacks))  # type: ignore[attr-defined]


def _anchored(trainer: pl.Trainer, callbacks: Iterable[Any]) -> Iterable[tuple[str, Any]]:
    yield from _anchored_beside_data(trainer, callbacks)
    # What loaders draw from is restored with their positions; not of those that only the user's code iterates.
    yield from ((f"loader {place}", exact.loader) for place, exact in enumerate(_loaders(trainer)))
    combined = (trainer.fit_loop._combined_loader, trainer.fit_loop.epoch_loop.val_loop._combined_loader)
    yield from ((f"loaders {place}", each) for place, each in enumerate(combined))
    sources = (each for exact in _loaders(trainer) for each in sources_of(exact.loader))
    yield from ((f"data {place}", each) for place, each in enumerate(sources))


def _anchored_beside_data(trainer: pl.Trainer, callbacks: Iterable[Any]) -> Iterable[tuple[str, Any]]:
    module = trainer.lightning_module
    yield from ((f"parameter {name}", each) for name, each in module.named_parameters())
    yield from ((f"buffer {name}", each) for name, each in module.named_buffers())
    yield from ((f"module {name}", each) for name, each in module.named_modules())
    yield from ((f"optimizer {place}", each) for place, each in enumerate(trainer.optimizers))
    wrapped: list[Any] = trainer.strategy._lightning_optimizers  # as code gets them from `self.optimizers()`
    yield from ((f"optimizer {place} of Lightning", each) for place, each in enumerate(wrapped))
    for place, optimizer in enumerate(trainer.optimizers):
        trained = (each for group in optimizer.param_groups for each in group["params"])
        yield from ((f"parameter {number} of optimizer {place}", each) for number, each in enumerate(trained))
        yield f"groups of optimizer {place}", optimizer.param_groups
        yield from (
            (f"group {number} of optimizer {place}", each) for number, each in enumerate(optimizer.param_groups)
        )
    for place, config in enumerate(trainer.lr_scheduler_configs):
        yield f"scheduler {place}", config.scheduler
    yield "trainer", trainer
    yield "strategy", trainer.strategy
    yield from ((f"logger {place}", each) for place, each in enumerate(trainer.loggers))
    yield from ((f"callback {place}", each) for place, each in enumerate(callbacks))
    yield "datamodule", trainer.datamodule  # type: ignore[attr-defined]


def _loaders(trainer: pl.Trainer) -> list[ExactLoader]:
    return [*training_loaders(trainer), *validation_loaders(trainer)]
