"""How `lightning-replica chaos` takes part in a script that was not written for it: as the trainer's extension.

LIGHTNING_REPLICA_CHAOS names a file of JSON, an `Experiment`. Without the variable, this module has no effect.
"""

import json
import os
from collections import defaultdict
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_replica._compat.lightning import leave_config_unsaved, limit_steps
from lightning_replica._compat.lightning_names import Checkpoint, pl
from lightning_replica.chaos.fault_injector import FaultInjector
from lightning_replica.chaos.fault_points import FaultPoint, FaultPointCallback
from lightning_replica.chaos.fingerprint import Fingerprint
from lightning_replica.checkpoint.directory import CheckpointDirectory
from lightning_replica.core.options import RecoveryOptions
from lightning_replica.errors import ConfigurationError
from lightning_replica.recovery.incident import Incident
from lightning_replica.report.log import IncidentLog
from lightning_replica.trainer.strategy import replica_strategy

VARIABLE = "LIGHTNING_REPLICA_CHAOS"
REACHED, STRUCK, INCIDENTS = "points{}.json", "struck.jsonl", "incidents.jsonl"


@dataclass(frozen=True)
class Experiment:
    """One run of the script.

    Attributes:
        folder: Where everything about the run is written; an absolute path.
        faults: The faults that strike, as text of `InjectedFault`.
        spaced: Whether a fault strikes only after ranks have recovered from the one before it.
        every_n_steps: Steps between fingerprints.
        options: Options of recovery that replace the script's own.
        hurt: Whether any fault strikes, injected or from outside.
        objects: Whether the user's objects are hashed, too.
        max_steps: The steps after which each fit ends, if not before; 0 for no limit.
        saves_to: Where the ranks save when they are told to end; empty if that is left to the script.
        resumes_from: The checkpoint from which the script resumes; empty for none.
        anew: Whether the script begins anew otherwise, also if it would resume from its newest checkpoint.
    """

    folder: str
    faults: list[str] = field(default_factory=list)
    spaced: bool = True
    every_n_steps: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    hurt: bool = False
    objects: bool = False
    max_steps: int = 0
    saves_to: str = ""
    resumes_from: str = ""
    anew: bool = False

    @classmethod
    def current(cls) -> "Experiment | None":
        """Return the experiment that this process is part of; None if there is none.

        Raises:
            ConfigurationError: If the variable names something that is not an experiment.
        """
        path = os.environ.get(VARIABLE)
        if not path:
            return None
        try:
            return cls(**json.loads(Path(path).read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigurationError(
                f"{VARIABLE}={path} is not an experiment of `lightning-replica chaos` ({error}). Unset it to train."
            ) from error

    def write(self, path: Path) -> None:
        """Write the file that `current` reads."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    def callbacks(self) -> list[pl.Callback]:
        """Return the callbacks that take part in the script's training."""
        folder = Path(self.folder)
        injector = FaultInjector(self.faults, spaced=self.spaced, record=folder / STRUCK)
        return [
            Fingerprint(folder, self.every_n_steps, self.objects),
            *([injector, _Incidents(folder)] if self.hurt else [_Map(folder)]),
            *([_Saves(Path(self.saves_to))] if self.saves_to else ()),
        ]


def overridden(options: RecoveryOptions) -> RecoveryOptions:
    """Return the script's options, except for those that an experiment sets."""
    experiment = Experiment.current()
    if experiment is None:
        return options
    return replace(options, **experiment.options, gasp=options.gasp or bool(experiment.saves_to))


def enter(trainer: pl.Trainer) -> None:
    """Add the experiment's callbacks to a trainer, before those that save checkpoints, which come last."""
    experiment = Experiment.current()
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if experiment is None or any(isinstance(callback, Fingerprint) for callback in callbacks):
        return
    leave_config_unsaved(trainer)
    position = next((i for i, callback in enumerate(callbacks) if isinstance(callback, Checkpoint)), len(callbacks))
    callbacks[position:position] = experiment.callbacks()
    if experiment.max_steps:
        limit_steps(trainer, experiment.max_steps)


def resume(chosen: str | None) -> str | None:
    """Return from where an experiment resumes: see `trainer.extension.Extension`."""
    experiment = Experiment.current()
    if experiment is None:
        return chosen
    return experiment.resumes_from or (None if experiment.anew else chosen)


class _Incidents(pl.Callback):
    """Writes the incidents that the faults cause to a file."""

    def __init__(self, folder: Path) -> None:
        self._log = IncidentLog(folder / INCIDENTS)

    def on_incident(self, trainer: pl.Trainer, pl_module: pl.LightningModule, incident: Incident) -> None:
        self._log.add(incident, trainer.global_rank)


class _Saves(pl.Callback):
    """Makes the ranks save to a directory when they are told to end."""

    def __init__(self, folder: Path) -> None:
        self._directory = CheckpointDirectory(folder)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            self._directory.prepare()
        replica_strategy(trainer, self).run_checkpoints.gasp_to(self._directory)


class _Map(FaultPointCallback):
    """Writes the last step at which this rank comes to each point to a file."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._last: dict[str, int] = defaultdict(int)

    def reach(self, trainer: pl.Trainer, point: FaultPoint) -> None:
        self._last[point] = replica_strategy(trainer, self).state.step

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        (self._folder / REACHED.format(trainer.global_rank)).write_text(json.dumps(self._last))
