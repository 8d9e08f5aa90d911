"""What the package does with private names of Lightning."""

import csv
import functools
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from torch.optim import Optimizer

from lightning_replica._compat import started
from lightning_replica._compat.lightning_names import (
    _HYDRA_AVAILABLE,
    _SUPPORTED_MODES,
    Accelerator,
    AsyncCheckpointIO,
    CheckpointIO,
    CombinedLoader,
    CPUAccelerator,
    CSVLogger,
    CUDAAccelerator,
    ExperimentWriter,
    MixedPrecision,
    ModelCheckpoint,
    MPSAccelerator,
    Precision,
    TorchCheckpointIO,
    _BaseProgress,
    _basic_subprocess_cmd,
    _FitLoop,
    _hydra_subprocess_cmd,
    _Loop,
    _WrappingCheckpointIO,
    load_hparams_from_yaml,
    rank_zero_only,
    sized_len,
)
from lightning_replica.errors import ConfigurationError

OF_TRAINER: Final = frozenset(
    (
        *("_accelerator_connector", "_callback_connector", "_checkpoint_connector", "_data_connector"),
        *("_default_root_dir", "_detect_anomaly", "_last_val_time", "_logger_connector", "_loggers"),
        *("_model_registry", "_signal_connector", "_train_start_time", "_val_check_time_interval"),
        *("accumulate_grad_batches", "barebones", "callbacks", "check_val_every_n_epoch", "datamodule"),
        *("enable_autolog_hparams", "fast_dev_run", "fit_loop", "gradient_clip_algorithm", "gradient_clip_val"),
        *("limit_predict_batches", "limit_test_batches", "limit_train_batches", "limit_val_batches"),
        *("log_every_n_steps", "num_sanity_val_steps", "overfit_batches", "predict_loop", "profiler"),
        *("reload_dataloaders_every_n_epochs", "should_stop", "state", "strategy", "test_loop", "val_check_batch"),
        *("val_check_interval", "validate_loop"),
    )
)
"""The names of all attributes that Lightning gives to a trainer, in any of the versions that are supported."""

SETTINGS_OF_TRAINER: Final = frozenset(
    (
        *("_val_check_time_interval", "callbacks", "check_val_every_n_epoch", "gradient_clip_algorithm"),
        *("gradient_clip_val", "limit_predict_batches", "limit_test_batches", "limit_train_batches"),
        *("limit_val_batches", "log_every_n_steps", "overfit_batches", "reload_dataloaders_every_n_epochs"),
        "val_check_interval",
    )
)
"""Those that are settings, which code may change in training; others change as training goes on."""


def device_is_a_guess(plugin: type[Precision], device: str, accelerator: Accelerator | None) -> bool:
    """Return whether Lightning made a plugin for ``device`` only because it does not recognize ``accelerator``.

    In that case, ``_AcceleratorConnector._check_and_init_precision`` makes a mixed precision plugin for CUDA. It never
    makes a plugin of the user's own class.
    """
    known = (CPUAccelerator, MPSAccelerator, CUDAAccelerator)
    return plugin is MixedPrecision and device == "cuda" and type(accelerator) not in known


def rerun_command(rank: int) -> tuple[Sequence[str], str | None]:
    """Return the command line that runs this script again, and its working directory (None: the current one).

    Raises:
        ConfigurationError: If there is no script, or in a Hydra multirun, where one command line runs several jobs.
    """
    main = sys.modules["__main__"]
    script = Path(getattr(main, "__file__", None) or "")
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name == "__main__":
        raise ConfigurationError(
            f"`replica_zero` starts its ranks by running the script again, but {sys.argv[0]!r} is a directory or an"
            " archive. Name the script itself, for example `python directory/__main__.py`."
        )
    if not script.is_file():
        raise ConfigurationError(
            "`replica_zero` starts its ranks by running the script again, but this script came from `python -c` or"
            " standard input. Save it to a file and run it with `python train.py`."
        )
    if _HYDRA_AVAILABLE:
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        if HydraConfig.initialized():
            if HydraConfig.get().mode == RunMode.MULTIRUN:
                raise ConfigurationError(
                    "`--multirun` trains several times in one process, but `replica_zero` starts its ranks by running"
                    " the command line again, and the process ends with its training. Start one process for each job,"
                    " e.g. in a shell loop."
                )
            return _hydra_subprocess_cmd(rank)
    command = _basic_subprocess_cmd()
    if spec is None:
        command = [command[0], str(script.absolute()), *command[2:]]  # `sys.argv` may be relative to another directory
    return command, None if os.getcwd() == started.DIRECTORY else started.DIRECTORY


def walk_loops(loop: _Loop, prefix: str = "") -> Iterator[tuple[str, _Loop]]:
    """Yield the loop and the loops inside it, each with the prefix that ``_Loop.state_dict`` gives it."""
    yield prefix, loop
    for name, value in vars(loop).items():
        if isinstance(value, _Loop):
            yield from walk_loops(value, f"{prefix}{name}.")


def save_loops(loop: _Loop) -> dict[str, Any]:
    """Return what ``_Loop.state_dict`` returns, without the state of dataloaders, in a tenth of the time."""
    state: dict[str, Any] = {}
    for prefix, inner in walk_loops(loop):
        state[f"{prefix}state_dict"] = {} if isinstance(inner, _FitLoop) else inner.on_save_checkpoint()
        for name, value in vars(inner).items():
            if isinstance(value, _BaseProgress):
                state[prefix + name] = _counters(value)
    return state


def _counters(progress: _BaseProgress) -> dict[str, Any]:
    return {
        name: _counters(value) if isinstance(value, _BaseProgress) else value for name, value in vars(progress).items()
    }


def load_loops(loop: _Loop, state: dict[str, Any]) -> None:
    """Restore all counters, without the "restarting" marks that ``_Loop.load_state_dict`` leaves.

    With these marks, Lightning guesses where training stopped. The package restores the exact place itself.
    """
    for prefix, inner in walk_loops(loop):
        inner._load_from_state_dict(state.copy(), prefix)
        inner.on_iteration_done()


def epoch_of(fit_loop: _FitLoop) -> int:
    """Return the epoch to set on samplers: the number of epochs that are done."""
    return int(fit_loop.epoch_progress.current.processed)  # type: ignore[attr-defined]


def iterate_instead(combined: CombinedLoader, loaders: list[Any]) -> None:
    """Make ``combined`` iterate ``loaders``; its ``iterables`` remain the loaders that it was made of."""
    combined._flattened = loaders


def length_of(combined: CombinedLoader) -> int | None:
    """Return how many batches an epoch of ``combined`` has, with its limits; None if it does not tell."""
    iterator = _SUPPORTED_MODES[combined._mode]["iterator"]
    return sized_len(iterator(combined.flattened, combined.limits))


def combining_state(combined: CombinedLoader) -> dict[str, Any]:
    """Return the position of a combined loader's own iterator, for every mode; its loaders' positions are not in it."""
    known: dict[str, Any] = {} if combined._iterator is None else vars(combined._iterator)
    state = {name: known[name] for name in ("_idx", "_iterator_idx", "_consumed") if name in known}
    return {name: list(value) if isinstance(value, list) else value for name, value in state.items()}


def put_combining_state(combined: CombinedLoader, state: dict[str, Any]) -> None:
    """Restore what `combining_state` returned, on an iterator that has just begun."""
    iterator: Any = combined._iterator
    for name, value in state.items():
        setattr(iterator, name, list(value) if isinstance(value, list) else value)
    if state.get("_iterator_idx"):
        iterator._load_current_iterator()


def dump_checkpoint(trainer: Any) -> dict[str, Any]:
    """Return what Lightning puts into a checkpoint. Call the hooks that add to it; collective if a hook is."""
    dumped: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    return dumped


def writes_archives(plugin: CheckpointIO | None) -> bool:
    """Return whether a plugin writes checkpoints with ``torch.save``."""
    while isinstance(plugin, _WrappingCheckpointIO):
        plugin = plugin.checkpoint_io
    return isinstance(plugin, TorchCheckpointIO)


def after_saves(plugin: CheckpointIO | None, work: Callable[[], None]) -> None:
    """Do ``work`` after what an `AsyncCheckpointIO` is still writing, in its thread; with any other plugin, now.

    If a write has failed, the work is not done: it may remove the only checkpoint.
    """
    while isinstance(plugin, _WrappingCheckpointIO) and not isinstance(plugin, AsyncCheckpointIO):
        plugin = plugin.checkpoint_io
    executor: Executor | None = getattr(plugin, "_executor", None) if isinstance(plugin, AsyncCheckpointIO) else None
    if executor is None:
        work()
        return

    def keep_error() -> None:
        try:
            if vars(plugin).get("_error") is None:
                work()
        except BaseException as error:
            vars(plugin)["_error"] = error  # raised where it raises those of its own

    executor.submit(keep_error)


def let_config_be_saved_again(trainer: Any) -> None:
    """Let LightningCLI's callback overwrite, on a replacement of rank 0, the config that its predecessor has saved.

    This does not set the callback's option ``overwrite``: with it, the callback skips a broadcast that the predecessor
    made.
    """
    for callback in _config_savers(trainer):
        save = callback.parser.save
        callback.parser.save = partial(_overwrite, save)


def _overwrite(save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return save(*args, **{**kwargs, "overwrite": True})


def checkpoint_exists(callback: ModelCheckpoint, path: Any) -> bool:
    """Return whether a checkpoint's file exists in the callback's file system. Only this rank looks."""
    return bool(callback._fs.exists(path))


def when_made(kind: type[Any], made: Callable[[Any], None]) -> None:
    """Call ``made`` with every instance of ``kind`` and its subclasses that this process makes from now on.

    When the first instance of a class is made, the ``__init__`` of that class is wrapped. So subclasses of `Logger`
    need no change.
    """

    def new(cls: type[Any], *_: Any, **__: Any) -> Any:
        if "_replica_init" not in vars(cls):
            cls._replica_init = cls.__init__
            cls.__init__ = _and_then(cls, cls.__init__, made)
        return object.__new__(cls)

    kind.__new__ = new  # type: ignore[assignment]


def _and_then(cls: type[Any], original: Callable[..., None], made: Callable[[Any], None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if type(self) is cls:  # not a subclass's call to super
            made(self)

    return init


class _ContinuedWriter(ExperimentWriter):
    """Appends to the metrics file that is there; the original deletes it."""

    def __init__(self, log_dir: str) -> None:
        super().__init__(log_dir)
        # The script logs its hyperparameters again. A file with objects in it cannot be read, as reading runs code.
        with suppress(Exception):
            self.hparams.update(load_hparams_from_yaml(os.path.join(log_dir, self.NAME_HPARAMS_FILE)))
        _cut_torn_line(self.metrics_file_path)
        if self._fs.isfile(self.metrics_file_path):
            with self._fs.open(self.metrics_file_path, "r", newline="") as file:
                self.metrics_keys = next(csv.reader(file), [])

    def _check_log_dir_exists(self) -> None:
        pass


def _cut_torn_line(path: str) -> None:
    """Remove the end of a last line that a process had no time to write, if the file is on a local disk."""
    if not os.path.isfile(path):
        return
    lines = Path(path).read_bytes()
    if b"\n" not in lines:
        os.remove(path)
    elif not lines.endswith(b"\n"):
        os.truncate(path, lines.rfind(b"\n") + 1)


def csv_file(logger: CSVLogger) -> str | None:
    """Return the path of a logger's file, with all earlier rows in it.

    Returns:
        None if the file is not on a local disk, or the logger is another one.
    """
    writer = logger.experiment
    if not isinstance(writer, ExperimentWriter) or not os.path.isdir(writer.log_dir):
        return None
    if writer.metrics:
        writer.save()
    path: str = writer.metrics_file_path
    return path


def widen_csv(logger: CSVLogger, path: str, names: Iterable[str]) -> None:
    """Give a logger's file columns for a row of the metrics ``names``.

    The original widens a file in place, so that one that is interrupted lacks rows.
    """
    writer = logger.experiment
    prefix = f"{logger._prefix}{logger.LOGGER_JOIN_CHAR}" if logger._prefix else ""
    columns = [*(f"{prefix}{name}" for name in names), "step"]
    if set(columns) <= set(writer.metrics_keys) or not os.path.isfile(path):
        return
    writer.metrics_keys = sorted({*columns, *writer.metrics_keys})
    with open(path, newline="") as old, open(f"{path}.widened", "w", newline="") as new:
        widened = csv.DictWriter(new, fieldnames=writer.metrics_keys)
        widened.writeheader()
        widened.writerows(csv.DictReader(old))
    shutil.copymode(path, f"{path}.widened")
    os.replace(f"{path}.widened", path)


def continue_csv(logger: CSVLogger) -> None:
    """Make a logger continue in the existing directory of its version."""
    if logger._experiment is None:
        logger._experiment = _ContinuedWriter(logger.log_dir)


def continue_in_place(trainer: Any) -> None:
    """Make a fit that resumes go on in the directories of the fit before: rows stay, a configuration may be there."""
    for logger in trainer.loggers if getattr(rank_zero_only, "rank", 0) == 0 else ():
        if isinstance(logger, CSVLogger):
            continue_csv(logger)
    for callback in _config_savers(trainer):
        callback.overwrite = True


def when_checkpoint_is_chosen(trainer: Any, call: Callable[[Any], None]) -> None:
    """Call ``call`` with the path of the checkpoint that Lightning has chosen to load, or None, before it loads it."""
    connector = trainer._checkpoint_connector

    def select(*args: Any, **kwargs: Any) -> Any:
        path = type(connector)._select_ckpt_path(connector, *args, **kwargs)
        call(path)
        return path

    connector._select_ckpt_path = select


def give_mesh(module: Any, mesh: Any) -> None:
    """Give a LightningModule the mesh that its ``device_mesh`` returns."""
    module._device_mesh = mesh


def leave_config_unsaved(trainer: Any) -> None:
    """Keep LightningCLI's callback from saving: a test runs many times, and the callback refuses to overwrite."""
    for callback in _config_savers(trainer):
        callback.already_saved = True


def limit_steps(trainer: Any, steps: int) -> None:
    """End each fit after this number of optimizer steps, if not before. Called before a fit begins."""
    loop = trainer.fit_loop.epoch_loop
    if not 0 <= loop.max_steps <= steps:
        loop.max_steps = steps


def _config_savers(trainer: Any) -> list[Any]:
    """Find LightningCLI's callback by its attributes, not by its class, because that module imports jsonargparse."""
    return [each for each in trainer.callbacks if hasattr(each, "already_saved") and hasattr(each, "overwrite")]


def ignore_interrupts(trainer: Any) -> None:
    """Ignore Ctrl-C until this process ends. Called when one has ended a fit, and Lightning exits next.

    Lightning ignores it too, but then restores the handler that was there before the fit. The supervisor passes Ctrl-C
    on to its ranks, so another one may come while the interpreter ends, and would print a traceback.
    """
    if threading.current_thread() is threading.main_thread():
        trainer._signal_connector._original_handlers[signal.SIGINT] = signal.SIG_IGN


class Sigterm:
    """Notes a SIGTERM, and acts on it only when all ranks have agreed on it.

    Lightning's own handler also broadcasts, from inside the signal handler. If the other ranks are gone or their groups
    are aborted, that broadcast may never return. Also, one rank must not set Lightning's flag before the others do.

    Args:
        trainer: The trainer that fits.
        others: Signals with the same meaning; Lightning restores their handlers when the fit is over.
        on_signal: Called in the signal's handler.

    Attributes:
        noted: Whether this process has received a SIGTERM or one of ``others``.
    """

    def __init__(self, trainer: Any, others: Sequence[signal.Signals], on_signal: Callable[[], None]) -> None:
        self._connector, self._on_signal = trainer._signal_connector, on_signal
        self.noted = False
        self._connector._sigterm_notifier_fn = self._note
        if others:
            self._connector._slurm_sigusr_handler_fn = self._note
        for signum in others if threading.current_thread() is threading.main_thread() else ():
            signal.signal(signum, self._note)

    def agree(self) -> None:
        """Set Lightning's flag, so that training ends with this batch."""
        self._connector.received_sigterm = True

    def _note(self, *_: Any) -> None:
        self.noted = True
        self._on_signal()


def user_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the user's own optimizer; Lightning passes a wrapper of it to hooks."""
    inner: Optimizer = getattr(optimizer, "_optimizer", optimizer)
    return inner
