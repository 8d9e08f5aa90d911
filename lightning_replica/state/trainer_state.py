"""What of a trainer goes into a snapshot, and how it is restored from one."""

import copy
from contextlib import nullcontext
from typing import Any

import torch

from lightning_replica._compat.lightning import load_loops, save_loops
from lightning_replica._compat.lightning_names import pl
from lightning_replica._compat.tree import Tree
from lightning_replica.core import plain
from lightning_replica.core.inexact import Report
from lightning_replica.core.recoverable import Kind
from lightning_replica.devices.interface import Device
from lightning_replica.state import data_setup, param_groups, process_settings
from lightning_replica.state.callback_state import (
    CallbackStates,
    batch_norm_momenta,
    follow_batch_norm_epoch,
    follow_weight_averaging,
    restore_callbacks,
    stateful,
)
from lightning_replica.state.data.in_loops import training_fetches, training_loaders, validation_loaders
from lightning_replica.state.metrics import MetricStates, export_results, import_results, put_states
from lightning_replica.state.module_buffers import BufferCopies
from lightning_replica.state.objects.tracked import Taken
from lightning_replica.state.own_states import MODES, MODES_BYTES, Logged, Own, States
from lightning_replica.state.reachable import Reachable, is_users_scheduler
from lightning_replica.state.snapshot import Components, Local, Private, Progress, Replicated, Snapshot
from lightning_replica.state.structure import Structure

# Attributes that callbacks (stochastic weight averaging), the epoch or user code change; plain data, as they are sent.
_ATTRIBUTES = {
    "fit_loop": ("max_epochs", "min_epochs", "max_batches", "_skip_backward", "lengths"),
    "epoch_loop": ("max_steps", "min_steps"),
    "trainer": ("val_check_batch",),
}
_OF_SCHEDULER_CONFIG = ("interval", "frequency", "monitor", "strict")


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

    def own(self, trainer: pl.Trainer, replicated: Replicated) -> plain.Pieces:
        """Pack the part of ``replicated``, just taken with these copies, that may differ between ranks."""
        flat = replicated.flat()
        schedulers = [self.schedulers.packed(str(place)) for place in range(len(flat["schedulers"]))]
        for name in MODES:
            self._modes.take(name, trainer, flat[name])
        modes = [(name, self._modes.packed(name)) for name in MODES]
        return self._own.pack(schedulers, self.callbacks.packed, modes, self._logged.pack(flat["logged"]))

    def mirrored(self, reached: Taken) -> plain.Pieces:
        """Pack the part of what `Reachable.take` returned that is mirrored; empty if nothing has changed."""
        if self._mirrored[0] is not reached:
            packed = plain.pack_in_pieces(self.reachable.private(reached)) if reached.changed else plain.Pieces()
            self._mirrored = reached, packed
        return self._mirrored[1]


def capture_progress(trainer: pl.Trainer, tree: Tree) -> Progress:
    """Return how far training has come; also in a hook of a validation."""
    connector = trainer._logger_connector
    fit_loop = trainer.fit_loop
    epoch_loop = fit_loop.epoch_loop
    training = [submodule.training for submodule in tree.modules]
    logger_fx = [connector._first_loop_iter, connector._current_fx]
    if trainer.validating:  # take the values that hold again after it
        modes = epoch_loop.val_loop._module_mode.mode
        training = [modes.get(name, module.training) for name, module in trainer.lightning_module.named_modules()]
        logger_fx = [epoch_loop.batch_progress.current.ready == 1, None]
    return Progress(
        loops=save_loops(fit_loop),
        val_seen=dict(epoch_loop.val_loop._seen_batches_per_dataloader),
        val_has_run=epoch_loop.val_loop._has_run,
        logged=[
            dict(connector._logged_metrics),
            dict(connector._callback_metrics),
            dict(connector._progress_bar_metrics),
        ],
        logger_fx=logger_fx,
        training=training,
        accumulate=trainer.accumulate_grad_batches,
        gradient=list(getattr(trainer.precision_plugin, "gradient", ())),
        requires_grad=[parameter.requires_grad for parameter in tree.parameters],
        should_stop=trainer.should_stop,
    )


def _capture_components(trainer: pl.Trainer, tree: Tree, copies: Copies, window: bool, whole: bool) -> Components:
    """Return the states of the trainer's components, detached from it."""
    return Components(
        schedulers=[
            copies.schedulers.take(str(place), each, each.state_dict(), is_users_scheduler(each))
            for place, each in enumerate(config.scheduler for config in trainer.lr_scheduler_configs)
        ],
        precision=copy.deepcopy(trainer.precision_plugin.state_dict()),
        callbacks=copies.callbacks.take(stateful(trainer)),
        buffers=copies.buffers.take(tree.buffers, window, whole),
        momenta=batch_norm_momenta(tree),
        groups=param_groups.take(trainer, tree),
        scheduler_configs=[_taken_of(config) for config in trainer.lr_scheduler_configs],
        fit_loop=_attributes_of(trainer.fit_loop, "fit_loop"),
        epoch_loop=_attributes_of(trainer.fit_loop.epoch_loop, "epoch_loop"),
        trainer=_attributes_of(trainer, "trainer"),
        settings=process_settings.take(),
    )


def _attributes_of(owner: Any, kind: str) -> dict[str, Any]:
    return {name: getattr(owner, name) for name in _ATTRIBUTES[kind]}


def _put_attributes(trainer: pl.Trainer, components: Components) -> None:
    taken = (
        (trainer.fit_loop, components.fit_loop),
        (trainer.fit_loop.epoch_loop, components.epoch_loop),
        (trainer, components.trainer),
    )
    for owner, attributes in taken:
        for name, value in attributes.items():
            setattr(owner, name, value)


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
    components, local = snapshot.replicated.whole(), snapshot.local
    restore_progress(trainer, snapshot)
    if components.precision:
        trainer.precision_plugin.load_state_dict(copy.deepcopy(components.precision))
    if local.schedulers is None:
        follow_weight_averaging(trainer, components.callbacks)
    else:
        trainer.lr_scheduler_configs[:] = [config for config, _ in local.schedulers]
        for config, scheduler in local.schedulers:
            config.scheduler = scheduler
    if local.callbacks is not None:
        trainer.callbacks[:] = local.callbacks  # type: ignore[attr-defined]
    # What `load_state_dict` sets beside the state belongs to a run that resumes; a predecessor never had it.
    with copies.reachable.unchanged() if local.sent and same_fit else nullcontext():
        _load_states(trainer, components, copies.report, same_process=same_fit and not local.sent)
    if same_fit:
        for config, taken in zip(trainer.lr_scheduler_configs, components.scheduler_configs, strict=True):
            _put_config(config, taken)
    follow_batch_norm_epoch(trainer, components.momenta)
    copies.reachable.put_back(local.reached)
    for sent in local.sent:
        copies.reachable.put_sent(sent)
    if same_fit:
        _put_attributes(trainer, components)
        process_settings.put_back(components.settings)
    copies.buffers.put_back(Tree.of(trainer.lightning_module).buffers, components.buffers, local.buffers)
    copies.buffers.due = snapshot.replicated.buffers_due


def _load_states(trainer: pl.Trainer, components: Components, report: Report, same_process: bool) -> None:
    """Load the states of schedulers and callbacks."""
    for config, saved in zip(trainer.lr_scheduler_configs, components.schedulers, strict=True):
        if saved is not None:
            config.scheduler.load_state_dict(copy.deepcopy(saved))
    restore_callbacks(stateful(trainer), components.callbacks, report, same_process)


def restore_progress(trainer: pl.Trainer, snapshot: Snapshot) -> None:
    """Restore what `capture_progress` returned, and the metrics under way."""
    progress = snapshot.replicated.progress
    module, connector, fit_loop = trainer.lightning_module, trainer._logger_connector, trainer.fit_loop
    torch.set_grad_enabled(True)
    trainer.training = True
    module._current_fx_name = None
    load_loops(fit_loop, copy.deepcopy(progress.loops))
    val_loop = fit_loop.epoch_loop.val_loop
    val_loop._seen_batches_per_dataloader.clear()
    val_loop._seen_batches_per_dataloader.update(progress.val_seen)
    val_loop._has_run = progress.val_has_run
    connector._logged_metrics, connector._callback_metrics, connector._progress_bar_metrics = map(dict, progress.logged)
    connector._first_loop_iter, connector._current_fx = progress.logger_fx
    trainer.accumulate_grad_batches = progress.accumulate
    trainer.should_stop = progress.should_stop
    if progress.gradient:
        plugin: Any = trainer.precision_plugin
        plugin.recall(*progress.gradient)
    for submodule, training in zip(module.modules(), progress.training, strict=True):
        submodule.training = training
    import_results(fit_loop.epoch_loop._results, snapshot.private.results, trainer.strategy.reduce, module)
    val_loop._results.reset()  # no snapshot is taken inside a validation
    if snapshot.private.metric_states:
        put_states(module.modules(), snapshot.private.metric_states)


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
    window = kind == "batch"
    replicated = Replicated(capture_progress(trainer, tree), _capture_components(trainer, tree, copies, window, whole))
    replicated.buffers_due = copies.buffers.due
    taken = Snapshot(kind, step, replicated, Private(device.rng_state()))
    take_data(trainer, taken, tree, copies.metrics)
    reached = copies.reachable.take(tree, window, whole)
    tensors = (tensor for _, tensor in reached.capture.tensors())
    copies.structure = Structure.of(tree, copies.structure, tensors)
    taken.local = Local(
        reached=reached,
        buffers=copies.buffers.own,
        schedulers=[(config, config.scheduler) for config in trainer.lr_scheduler_configs],
        callbacks=list(trainer.callbacks),  # type: ignore[attr-defined]
        structure=copies.structure,
    )
    taken.private.own = copies.own(trainer, replicated)
    taken.private.objects = copies.mirrored(reached)
    taken.private.buffers = copies.buffers.packed()
    taken.private.data_setups = data_setup.take(trainer)
    return taken


def take_data(trainer: pl.Trainer, snapshot: Snapshot, tree: Tree, metrics: MetricStates) -> None:
    """Put into the private part of a snapshot the position in the data, and metrics under way."""
    private, window = snapshot.private, snapshot.kind == "batch"
    private.results = export_results(trainer.fit_loop.epoch_loop._results)
    private.metric_states = metrics.copy(tree)
    back = fetched_ahead(trainer) + snapshot.ends_with_batch
    states, private.fetching = training_fetches(trainer).state(back)
    loaders = training_loaders(trainer)
    private.loaders = [each.with_content(state, window) for each, state in zip(loaders, states, strict=False)]
    private.validation = [each.with_content(each.state_between(), window) for each in validation_loaders(trainer)]


def fetched_ahead(trainer: pl.Trainer) -> int:
    """Return how many batches Lightning's fetcher holds before the loop needs them: one if the data has no length."""
    return len(getattr(trainer.fit_loop._data_fetcher, "batches", ()))
