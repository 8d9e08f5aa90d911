"""The host state of a rank: what it consists of, how it is taken and how it is restored.

[Note: replicated and private]
Counters of loops, hyperparameters of param groups, shared buffers and more are the same on every rank. A replacement
takes them from a peer. Random numbers, data position, metrics under way, the closure's loss and buffers that differ
from the shared ones (state/module_buffers.py) belong to one rank. Its peers keep a copy of them (recovery.mirror).
States of schedulers and callbacks, modes of modules and the values that were last logged are mostly the same on every
rank. They are in both parts, and a replacement uses its predecessor's (state/own_states.py). So are parameters that no
shard holds, and what the model consists of, once code has changed them.
"""

import copy
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch

from lightning_replica._compat.lightning import load_loops, save_loops
from lightning_replica._compat.lightning_names import pl
from lightning_replica._compat.tree import Tree
from lightning_replica.core import plain
from lightning_replica.core.inexact import Report, warn
from lightning_replica.core.recoverable import Kind
from lightning_replica.devices.interface import Device
from lightning_replica.errors import RecoveryError
from lightning_replica.state import data_setup, own_states, param_groups, process_settings
from lightning_replica.state.callback_state import (
    CallbackStates,
    batch_norm_momenta,
    follow_batch_norm_epoch,
    follow_weight_averaging,
    restore_callbacks,
    stateful,
)
from lightning_replica.state.data.fetches import Fetching
from lightning_replica.state.data.in_loops import training_fetches, training_loaders, validation_loaders
from lightning_replica.state.data.loader_state import LoaderState
from lightning_replica.state.data_setup import DataSetup
from lightning_replica.state.frozen import FrozenValues
from lightning_replica.state.metrics import (
    MetricStates,
    export_results,
    import_results,
    pack_states,
    put_states,
    unpack_states,
)
from lightning_replica.state.module_buffers import BufferCopies
from lightning_replica.state.objects.tracked import Taken
from lightning_replica.state.own_states import MODES, MODES_BYTES, Logged, Own, States
from lightning_replica.state.reachable import Reachable, is_users_scheduler
from lightning_replica.state.structure import Structure

Place: TypeAlias = Literal["batch", "tail", "batch_end", "validation_end", "epoch_end"]
"""Where in the loops a fit begins that resumes from a checkpoint; see trainer/saving/resume.py."""

# Attributes that callbacks (stochastic weight averaging), the epoch or user code change; plain data, as they are sent.
_ATTRIBUTES = {
    "fit_loop": ("max_epochs", "min_epochs", "max_batches", "_skip_backward", "lengths"),
    "epoch_loop": ("max_steps", "min_steps"),
    "trainer": ("val_check_batch",),
}
_OF_SCHEDULER_CONFIG = ("interval", "frequency", "monitor", "strict")


@dataclass
class Snapshot:
    """The host state of one rank at one point.

    Attributes:
        kind: "batch": taken before the first batch of a window is fetched. "tail": taken when the commit is entered.
        step: Number of updates that are applied when training resumes from here.
        replicated: Plain data and tensors, the same on all ranks.
        rng: State of all generators.
        results: Metrics under way, as `metrics.export_results` gives them.
        loss: The training step's loss, as `metrics.to_plain` gives it; only in a tail.
        loaders: The states of the training loaders; in a tail, those before the step's last batch.
        fetching: How far fetching from these loaders has come, at the same point.
        validation: The state of validation loaders that lasts from one validation to the next.
        fresh: Whether this is the tail before the first step of the fit, which has not begun yet.
        batch: The batch of the step; only in a tail, only on the rank that took the snapshot.
        output: What the closure returned; only where ``batch`` is.
        extras: The same without the loss, packed, if user code may look at it; only in a tail.
        metric_states: States of torchmetrics objects in the module.
        reached: What the user's objects hold; empty on a replacement.
        mirrored: The part of it that is mirrored, packed.
        attributes: What optimizers keep beside their state, packed; only for checkpoints.
        data_setups: How training loaders and validation loaders were made, if they are made more than once.
        sent: What objects held in another process: on a replacement, those of its peer, then those of its predecessor,
            which take precedence; from a checkpoint, those of the rank that wrote it.
        own: States of schedulers and callbacks and logged values, as they are mirrored; not for checkpoints.
        buffers: This rank's buffers that differ from those in ``replicated``.
        packed_buffers: The same, as they are mirrored; empty if they are not.
        packed_frozen: Parameters that no shard holds, as they are mirrored; empty if none has been written.
        packed_outline: What the module consists of, as it is mirrored.
        schedulers: The scheduler configs themselves, which callbacks may replace, with their schedulers; None on a
            replacement.
        trainer_callbacks: The callbacks, which may remove themselves; None on a replacement. They are put back before
            their states are, and with all else that the trainer refers to.
        frozen: What parameters held that no shard holds, as far as they change; empty on a replacement.
        structure: What the module consists of; None if the snapshot came from a checkpoint.
    """

    kind: Kind
    step: int
    replicated: dict[str, Any]
    rng: bytes
    results: list[dict[str, Any]]
    loaders: list[LoaderState] = field(default_factory=list)
    fetching: Fetching = Fetching()
    validation: list[LoaderState] = field(default_factory=list)
    loss: list[Any] | None = None
    fresh: bool = False
    batch: Any = None
    output: dict[str, Any] = field(default_factory=dict)
    extras: bytes = b""
    metric_states: list[dict[str, Any]] = field(default_factory=list)
    reached: Taken = field(default_factory=Taken)
    mirrored: bytes | plain.Pieces = b""
    attributes: bytes = b""
    data_setups: list[DataSetup | None] = field(default_factory=list)
    sent: tuple[list[Any], ...] = ()
    own: bytes | plain.Pieces = b""
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    packed_buffers: bytes = b""
    packed_frozen: bytes | plain.Pieces = b""
    packed_outline: bytes = b""
    schedulers: list[tuple[Any, Any]] | None = None
    trainer_callbacks: list[Any] | None = None
    structure: Structure | None = None
    frozen: FrozenValues = field(default_factory=list)

    def take_over(self, packed: bytes) -> None:
        """Take over what objects held in another process."""
        self.mirrored, self.sent = packed, (plain.unpack(packed, placed=True),) if packed else ()

    def take_over_buffers(self, packed: bytes) -> None:
        """Take over the buffers that a rank had of its own."""
        self.packed_buffers, self.buffers = packed, plain.unpack(packed) if packed else {}

    @property
    def place(self) -> Place | None:
        """Where a fit begins that resumes from a checkpoint inside of an epoch; only if `fresh`."""
        place: Place | None = self.replicated.get("place")
        return place

    @property
    def ends_with_batch(self) -> bool:
        """Whether the hooks that follow still have to see the previous batch."""
        return self.place in ("tail", "batch_end") if self.fresh else self.kind == "tail"

    def private(self) -> plain.Pieces:
        """Return the private part, as it is mirrored: plain data and tensors, packed."""
        loaders = [[list(state) for state in states] for states in (self.loaders, self.validation)]
        setups = [None if setup is None else list(setup) for setup in self.data_setups]
        rest = [self.loss, self.fresh, self._packed_states(), self.mirrored, self.own, setups, list(self.fetching)]
        packed = [self.extras, self.attributes, self.packed_buffers, self.packed_frozen, self.packed_outline]
        return plain.pack_lists_in_pieces([self.rng, self.results, *loaders, *rest, *packed])

    def _packed_states(self) -> plain.Pieces:
        """Pack the metric states. They are the user's, and may hold tuples, and values that cannot be packed."""
        return pack_states(self.metric_states, _plain_part) if self.metric_states else plain.Pieces()

    def replicated_bytes(self) -> bytes:
        """Return the replicated part.

        Raises:
            RecoveryError: If the part holds a value that cannot be sent.
        """
        try:
            return plain.save(self.replicated)
        except plain.NotPlainError as error:
            raise RecoveryError(
                f"A lost rank cannot be replaced: {_culprit(self.replicated)} cannot be sent, {error}. Keep numbers,"
                " strings, tensors and containers of these there, or allow the type on every rank with"
                " `torch.serialization.add_safe_globals`."
            ) from error

    @classmethod
    def from_bytes(cls, kind: Kind, step: int, replicated: bytes, private: bytes) -> "Snapshot":
        """Return a replacement's snapshot, made from what a peer sent."""
        taken = cls.of_private(kind, step, private)
        taken.replicated = plain.load(replicated)
        own_states.put(taken.replicated, taken.own)
        return taken

    @classmethod
    def of_private(cls, kind: Kind, step: int, private: bytes) -> "Snapshot":
        """Return a snapshot with the private part alone, made from what `private` returned."""
        parts = plain.unpack(private)
        rng, results, loaders, validation, loss, fresh, states, kept, own, setups, fetching, *packed = parts
        extras, attributes, buffers, *of_model = packed
        taken = cls(kind, step, {}, rng, results, loss=loss, fresh=fresh, own=own, extras=extras, attributes=attributes)
        taken.loaders, taken.validation = ([LoaderState.of(each) for each in of] for of in (loaders, validation))
        taken.fetching = Fetching.of(fetching)
        taken.metric_states = unpack_states(states) if states else []
        taken.take_over(kept)
        taken.take_over_buffers(buffers)
        taken.packed_frozen, taken.packed_outline = of_model or (b"", b"")  # an earlier version's checkpoint has none
        taken.data_setups = [None if setup is None else DataSetup(*setup) for setup in setups]
        return taken


_warned: set[str] = set()


def _plain_part(state: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a torchmetrics object's state that can be mirrored.

    A warning names the rest once. A replacement leaves it as the script has built it; a survivor has its own.
    """
    kept = {}
    for name, value in state.items():
        try:
            plain.pack(value)
            kept[name] = value
        except plain.NotPlainError as error:
            if name != "_computed" and name not in _warned:  # what `compute` returned is computed again
                _warned.add(name)
                why = "a replacement starts it anew. Keep tensors, numbers, strings and containers of these in it"
                warn(f"the metric state {name!r}", f"{error}; {why}", "replacement")
    return kept


def _culprit(replicated: dict[str, Any]) -> str:
    """Return the name of the part of the state that `plain.save` refuses."""
    parts = {f"the state of {key!r}": state for key, state in replicated.get("callbacks", {}).items()}
    parts |= {f"{key!r} of the trainer's state": value for key, value in replicated.items() if key != "callbacks"}
    for name, part in parts.items():
        try:
            plain.save(part)
        except plain.NotPlainError:
            return name
    return "the trainer's state"


class Copies:
    """Copies of state that is large and seldom changes, kept from one snapshot to the next.

    Args:
        trainer: The trainer, before training.
        report: Called with what is not restored exactly.
    """

    def __init__(self, trainer: pl.Trainer, report: Report) -> None:
        self.report = report
        self.reachable = Reachable(trainer, report)
        self.buffers = BufferCopies(report)
        self.callbacks = CallbackStates(report)
        self.schedulers = States("scheduler", report)
        self.structure: Structure | None = None
        self.tree: Tree | None = None
        self.metrics = MetricStates(report)
        self._modes = States("the trainer:", report, MODES_BYTES)
        self._logged, self._own = Logged(), Own()
        self._mirrored: tuple[Taken | None, plain.Pieces] = None, plain.Pieces()

    def own(self, trainer: pl.Trainer, replicated: dict[str, Any]) -> plain.Pieces:
        """Pack the part of ``replicated``, just taken with these copies, that may differ between ranks."""
        schedulers = [self.schedulers.packed(str(place)) for place in range(len(replicated["schedulers"]))]
        for name in MODES:
            self._modes.take(name, trainer, replicated[name])
        modes = [(name, self._modes.packed(name)) for name in MODES]
        return self._own.pack(schedulers, self.callbacks.packed, modes, self._logged.pack(replicated["logged"]))

    def mirrored(self, reached: Taken) -> plain.Pieces:
        """Pack the part of what `Reachable.take` returned that is mirrored; empty if nothing has changed."""
        if self._mirrored[0] is not reached:
            packed = plain.pack_in_pieces(self.reachable.private(reached)) if reached.changed else plain.Pieces()
            self._mirrored = reached, packed
        return self._mirrored[1]


def capture_progress(trainer: pl.Trainer, tree: Tree) -> dict[str, Any]:
    """Return the part of the replicated state that says how far training has come; also in a hook of a validation."""
    connector = trainer._logger_connector
    fit_loop = trainer.fit_loop
    epoch_loop = fit_loop.epoch_loop
    training = [submodule.training for submodule in tree.modules]
    logger_fx = [connector._first_loop_iter, connector._current_fx]
    if trainer.validating:  # take the values that hold again after it
        modes = epoch_loop.val_loop._module_mode.mode
        training = [modes.get(name, module.training) for name, module in trainer.lightning_module.named_modules()]
        logger_fx = [epoch_loop.batch_progress.current.ready == 1, None]
    return {
        "loops": save_loops(fit_loop),
        "val_seen": dict(epoch_loop.val_loop._seen_batches_per_dataloader),
        "val_has_run": epoch_loop.val_loop._has_run,
        "logged": [
            dict(connector._logged_metrics),
            dict(connector._callback_metrics),
            dict(connector._progress_bar_metrics),
        ],
        "logger_fx": logger_fx,
        "training": training,
        "accumulate": trainer.accumulate_grad_batches,
        "gradient": list(getattr(trainer.precision_plugin, "gradient", ())),
        "requires_grad": [parameter.requires_grad for parameter in tree.parameters],
        "should_stop": trainer.should_stop,
    }


def _capture(trainer: pl.Trainer, tree: Tree, copies: Copies, window: bool, whole: bool) -> dict[str, Any]:
    """Return the replicated host state, detached from the trainer."""
    return {
        **capture_progress(trainer, tree),
        "schedulers": [
            copies.schedulers.take(str(place), each, each.state_dict(), is_users_scheduler(each))
            for place, each in enumerate(config.scheduler for config in trainer.lr_scheduler_configs)
        ],
        "scheduler_configs": [_taken_of(config) for config in trainer.lr_scheduler_configs],
        "groups": param_groups.take(trainer, tree),
        "precision": copy.deepcopy(trainer.precision_plugin.state_dict()),
        "callbacks": copies.callbacks.take(stateful(trainer)),
        **{key: {each: getattr(owner, each) for each in _ATTRIBUTES[key]} for key, owner in _owners(trainer)},
        "settings": process_settings.take(),
        "buffers": copies.buffers.take(tree.buffers, window, whole),
        "buffers_due": copies.buffers.due,
        "momenta": batch_norm_momenta(tree),
    }


def _owners(trainer: pl.Trainer) -> list[tuple[str, Any]]:
    return [("fit_loop", trainer.fit_loop), ("epoch_loop", trainer.fit_loop.epoch_loop), ("trainer", trainer)]


def _taken_of(config: Any) -> list[Any]:
    """Return the settings of a scheduler, and the names of the attributes that it has."""
    return [[getattr(config, name) for name in _OF_SCHEDULER_CONFIG], [*getattr(config.scheduler, "__dict__", ())]]


def _put_config(config: Any, taken: list[Any]) -> None:
    """Restore what `_taken_of` returned: `load_state_dict` removes no attribute. The user's go back by themselves."""
    settings, names = taken
    for name, value in zip(_OF_SCHEDULER_CONFIG, settings, strict=True):
        setattr(config, name, value)
    if not is_users_scheduler(config.scheduler):
        for name in getattr(config.scheduler, "__dict__", {}).keys() - set(names):
            delattr(config.scheduler, name)


def restore(trainer: pl.Trainer, snapshot: Snapshot, copies: Copies, same_fit: bool = True) -> None:
    """Restore the trainer from ``snapshot``, except the generators in ``rng``.

    The caller restores these last, because this function may draw random numbers.

    Args:
        trainer: The trainer.
        snapshot: The snapshot to restore.
        copies: What has been kept for snapshots.
        same_fit: Whether it was taken in this fit. A fit that resumes from a checkpoint may have other limits.
    """
    state = snapshot.replicated
    restore_progress(trainer, snapshot)
    if state["precision"]:
        trainer.precision_plugin.load_state_dict(copy.deepcopy(state["precision"]))
    if snapshot.schedulers is None:
        follow_weight_averaging(trainer, state["callbacks"])
    else:
        trainer.lr_scheduler_configs[:] = [config for config, _ in snapshot.schedulers]
        for config, scheduler in snapshot.schedulers:
            config.scheduler = scheduler
    if snapshot.trainer_callbacks is not None:
        trainer.callbacks[:] = snapshot.trainer_callbacks  # type: ignore[attr-defined]
    # What `load_state_dict` sets beside the state belongs to a run that resumes; a predecessor never had it.
    with copies.reachable.unchanged() if snapshot.sent and same_fit else nullcontext():
        _load_states(trainer, state, copies.report, same_process=same_fit and not snapshot.sent)
    if same_fit:
        for config, taken in zip(trainer.lr_scheduler_configs, state["scheduler_configs"], strict=True):
            _put_config(config, taken)
    follow_batch_norm_epoch(trainer, state["momenta"])
    copies.reachable.put_back(snapshot.reached)
    for sent in snapshot.sent:
        copies.reachable.put_sent(sent)
    if same_fit:
        for key, owner in _owners(trainer):
            for name, value in state[key].items():
                setattr(owner, name, value)
        process_settings.put_back(state.get("settings", {}))
    copies.buffers.put_back(Tree.of(trainer.lightning_module).buffers, state["buffers"], snapshot.buffers)
    copies.buffers.due = state.get("buffers_due", True)  # an earlier version's checkpoint has none


def _load_states(trainer: pl.Trainer, state: dict[str, Any], report: Report, same_process: bool) -> None:
    """Load the states of schedulers and callbacks."""
    for config, saved in zip(trainer.lr_scheduler_configs, state["schedulers"], strict=True):
        if saved is not None:
            config.scheduler.load_state_dict(copy.deepcopy(saved))
    restore_callbacks(stateful(trainer), state["callbacks"], report, same_process)


def restore_progress(trainer: pl.Trainer, snapshot: Snapshot) -> None:
    """Restore what `capture_progress` returned, and the metrics under way."""
    state = snapshot.replicated
    module, connector, fit_loop = trainer.lightning_module, trainer._logger_connector, trainer.fit_loop
    torch.set_grad_enabled(True)
    trainer.training = True
    module._current_fx_name = None
    load_loops(fit_loop, copy.deepcopy(state["loops"]))
    val_loop = fit_loop.epoch_loop.val_loop
    val_loop._seen_batches_per_dataloader.clear()
    val_loop._seen_batches_per_dataloader.update(state["val_seen"])
    val_loop._has_run = state["val_has_run"]
    connector._logged_metrics, connector._callback_metrics, connector._progress_bar_metrics = map(dict, state["logged"])
    connector._first_loop_iter, connector._current_fx = state["logger_fx"]
    trainer.accumulate_grad_batches = state["accumulate"]
    trainer.should_stop = state.get("should_stop", False)  # an earlier version's checkpoint may have none
    if state.get("gradient"):  # an earlier version's checkpoint has none
        plugin: Any = trainer.precision_plugin
        plugin.recall(*state["gradient"])
    for submodule, training in zip(module.modules(), state["training"], strict=True):
        submodule.training = training
    import_results(fit_loop.epoch_loop._results, snapshot.results, trainer.strategy.reduce, module)
    val_loop._results.reset()  # no snapshot is taken inside a validation
    if snapshot.metric_states:
        put_states(module.modules(), snapshot.metric_states)


def take(trainer: pl.Trainer, device: Device, kind: Kind, step: int, copies: Copies, whole: bool = False) -> Snapshot:
    """Take a snapshot of the trainer, and of the generators of its device, as they are now.

    Args:
        trainer: The trainer.
        device: The device.
        kind: See `Snapshot`.
        step: See `Snapshot`.
        copies: What has been kept for snapshots.
        whole: Whether all contents are compared with their copies, whatever their size.
    """
    tree = copies.tree = Tree.of(trainer.lightning_module, copies.tree)
    replicated = _capture(trainer, tree, copies, kind == "batch", whole)
    taken = take_private(trainer, Snapshot(kind, step, replicated, device.rng_state(), []), tree, copies.metrics)
    taken.own = copies.own(trainer, replicated)
    taken.reached = copies.reachable.take(tree, kind == "batch", whole)
    taken.mirrored = copies.mirrored(taken.reached)
    taken.buffers, taken.packed_buffers = copies.buffers.own, copies.buffers.packed()
    taken.data_setups = data_setup.take(trainer)
    tensors = (tensor for _, tensor in taken.reached.capture.tensors())
    taken.structure = copies.structure = Structure.of(tree, copies.structure, tensors)
    return taken


def take_private(trainer: pl.Trainer, snapshot: Snapshot, tree: Tree, metrics: MetricStates) -> Snapshot:
    """Complete a snapshot with the state that belongs to this rank, and return it."""
    snapshot.results = export_results(trainer.fit_loop.epoch_loop._results)
    snapshot.metric_states = metrics.copy(tree)
    snapshot.schedulers = [(config, config.scheduler) for config in trainer.lr_scheduler_configs]
    snapshot.trainer_callbacks = list(trainer.callbacks)  # type: ignore[attr-defined]
    back = fetched_ahead(trainer) + (snapshot.ends_with_batch)
    states, snapshot.fetching = training_fetches(trainer).state(back)
    loaders, window = training_loaders(trainer), snapshot.kind == "batch"
    snapshot.loaders = [each.with_content(state, window) for each, state in zip(loaders, states, strict=False)]
    snapshot.validation = [each.with_content(each.state_between(), window) for each in validation_loaders(trainer)]
    return snapshot


def fetched_ahead(trainer: pl.Trainer) -> int:
    """Return how many batches Lightning's fetcher holds before the loop needs them: one if the data has no length."""
    return len(getattr(trainer.fit_loop._data_fetcher, "batches", ()))
