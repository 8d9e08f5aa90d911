"""How `lightning-replica chaos` gets into a script that knows nothing of it: by an environment variable.

LIGHTNING_REPLICA_CHAOS names a file of JSON, an `Experiment`. Without the variable nothing here does anything.
"""

import json
import os
from collections import defaultdict
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint

from lightning_replica._compat.lightning import leave_config_unsaved
from lightning_replica.callbacks.fault_injector import FaultInjector
from lightning_replica.callbacks.fingerprint import Fingerprint
from lightning_replica.callbacks.places import PlaceCallback
from lightning_replica.callbacks.recovery_report import RecoveryReport
from lightning_replica.errors import ConfigurationError
from lightning_replica.recovery.options import RecoveryOptions

if TYPE_CHECKING:
    from lightning_replica.callbacks.places import Place

VARIABLE = "LIGHTNING_REPLICA_CHAOS"
PLACES, STRUCK, INCIDENTS = "places{}.json", "struck.jsonl", "incidents.jsonl"


@dataclass(frozen=True)
class Experiment:
    """One run of the script.

    Attributes:
        folder: Where everything about the run is written; an absolute path.
        faults: What strikes, as `InjectedFault` writes it.
        spaced: Whether the faults leave each other time.
        every_n_steps: Steps between fingerprints.
        options: Options of recovery that the script's own give way to.
        hurt: Whether something strikes, from inside or from outside.
    """

    folder: str
    faults: list[str] = field(default_factory=list)
    spaced: bool = True
    every_n_steps: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    hurt: bool = False

    @classmethod
    def current(cls) -> "Experiment | None":
        """The experiment that this process is part of.

        Raises:
            ConfigurationError: If the variable names something else.
        """
        path = os.environ.get(VARIABLE)
        if not path:
            return None
        try:
            return cls(**json.loads(Path(path).read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigurationError(
                f"{VARIABLE}={path} is no experiment of `lightning-replica chaos` ({error}). Unset it to train."
            ) from error

    def write(self, path: Path) -> None:
        """Writes the file that `current` reads."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    def callbacks(self) -> list[pl.Callback]:
        """What takes part in the script's training."""
        folder = Path(self.folder)
        injector = FaultInjector(self.faults, spaced=self.spaced, record=folder / STRUCK)
        report = RecoveryReport(folder / INCIDENTS)
        return [Fingerprint(folder, self.every_n_steps), *([injector, report] if self.hurt else [_Map(folder)])]


def overridden(options: RecoveryOptions) -> RecoveryOptions:
    """The script's options, but for those that an experiment needs."""
    experiment = Experiment.current()
    return options if experiment is None else replace(options, **experiment.options)


def enter(trainer: pl.Trainer) -> None:
    """Adds the experiment's callbacks to a trainer, before those that save checkpoints, which come last."""
    experiment = Experiment.current()
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if experiment is None or any(isinstance(callback, Fingerprint) for callback in callbacks):
        return
    leave_config_unsaved(trainer)
    place = next((i for i, callback in enumerate(callbacks) if isinstance(callback, Checkpoint)), len(callbacks))
    callbacks[place:place] = experiment.callbacks()


class _Map(PlaceCallback):
    """Writes down the last step at which this rank comes to each place."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._last: dict[str, int] = defaultdict(int)

    def reach(self, trainer: pl.Trainer, place: "Place") -> None:
        self._last[place] = trainer.strategy.state.step  # type: ignore[attr-defined]

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        (self._folder / PLACES.format(trainer.global_rank)).write_text(json.dumps(self._last))
