"""Puts exact loaders into a trainer's loops, finds them there, and takes them out again."""

from collections.abc import Sequence
from typing import Any

from lightning_replica._compat.lightning import iterate_instead
from lightning_replica._compat.lightning_names import CombinedLoader, pl
from lightning_replica.core.inexact import Report, warn
from lightning_replica.devices.host import rng_state, set_rng_state
from lightning_replica.state.data.fetches import Fetches, fetches_of, forget, note
from lightning_replica.state.data.inputs import Inputs
from lightning_replica.state.data.position import ExactLoader
from lightning_replica.state.data.sources import NO_TRAINING, TrainingObjects


def put_in(
    combined: CombinedLoader | None,
    noted: bool = False,
    inputs: Inputs | None = None,
    report: Report = warn,
    former: Sequence[ExactLoader] = (),
    training: TrainingObjects = NO_TRAINING,
) -> None:
    """Make ``combined`` iterate exact loaders in place of its own, with all changes that were made to those.

    Args:
        combined: What a loop iterates, if it has anything to iterate.
        noted: Whether to note fetches, so that ``combined`` can be put back to the middle of an iteration.
        inputs: Which ranks have inputs, if they may have different numbers of batches; only if fetches are noted.
        report: Called with what is not restored exactly.
        former: The exact loaders that these take the place of.
        training: What the training consists of beside its data.
    """
    if combined is not None:
        exact = [_exact(loader, report, former, training) for loader in combined.flattened]
        iterate_instead(combined, exact)
        if noted:
            note(combined, exact, inputs)


def take_out(combined: CombinedLoader | None) -> None:
    """Shut down all workers, and leave ``combined``, which may be the user's, as it would be without this package."""
    if combined is not None:
        loaders = combined.flattened
        forget(combined)
        for loader in exact_loaders(combined):
            loader.close()
        iterate_instead(combined, [each.loader if isinstance(each, ExactLoader) else each for each in loaders])


def exact_loaders(combined: CombinedLoader | None) -> list[ExactLoader]:
    """Return the exact loaders that were put into ``combined``."""
    return [loader for loader in combined.flattened if isinstance(loader, ExactLoader)] if combined is not None else []


def training_loaders(trainer: pl.Trainer) -> list[ExactLoader]:
    """Return the exact loaders of the training."""
    return exact_loaders(trainer.fit_loop._combined_loader)


def training_fetches(trainer: pl.Trainer) -> Fetches:
    """Return the noted fetches of the training loaders; without any fetch before there are loaders."""
    combined = trainer.fit_loop._combined_loader
    return fetches_of(combined) or Fetches(CombinedLoader([]), [])


def validation_loaders(trainer: pl.Trainer) -> list[ExactLoader]:
    """Return the exact loaders of validations during the training."""
    return exact_loaders(trainer.fit_loop.epoch_loop.val_loop._combined_loader)


def _exact(loader: Any, report: Report, former: Sequence[ExactLoader], training: TrainingObjects) -> ExactLoader:
    if isinstance(loader, ExactLoader):
        return loader
    return ExactLoader(loader, rng_state, set_rng_state, report, former, training)
