"""The exact loaders inside a trainer's loops: put there, found, and taken out again."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_replica._compat.lightning import iterate_instead
from lightning_replica.data.fetches import Fetches, fetches_of, forget, note
from lightning_replica.data.position import ExactLoader
from lightning_replica.devices.host import rng_state, set_rng_state


def put_in(combined: CombinedLoader | None, noted: bool = False) -> None:
    """Has ``combined`` iterate exact loaders in place of those that it has, with all that was done to them.

    Args:
        combined: What a loop iterates.
        noted: Whether fetches are noted: it will be put back to the middle of an iteration.
    """
    if combined is not None:
        exact = [_exact(loader) for loader in combined.flattened]
        iterate_instead(combined, exact)
        if noted:
            note(combined, exact)


def take_out(combined: CombinedLoader | None) -> None:
    """Leaves no workers behind, and ``combined``, which may be the user's, as it would be without us."""
    if combined is not None:
        loaders = combined.flattened
        forget(combined)
        for loader in exact_loaders(combined):
            loader.close()
        iterate_instead(combined, [each.loader if isinstance(each, ExactLoader) else each for each in loaders])


def exact_loaders(combined: CombinedLoader | None) -> list[ExactLoader]:
    """Those that were put in."""
    return [loader for loader in combined.flattened if isinstance(loader, ExactLoader)] if combined is not None else []


def training_loaders(trainer: pl.Trainer) -> list[ExactLoader]:
    """Those of the training."""
    return exact_loaders(trainer.fit_loop._combined_loader)


def training_fetches(trainer: pl.Trainer) -> Fetches:
    """What they have been asked for; nothing before there are any."""
    combined = trainer.fit_loop._combined_loader
    return fetches_of(combined) or Fetches(CombinedLoader([]), [])


def validation_loaders(trainer: pl.Trainer) -> list[ExactLoader]:
    """Those of validations during the training."""
    return exact_loaders(trainer.fit_loop.epoch_loop.val_loop._combined_loader)


def _exact(loader: Any) -> ExactLoader:
    return loader if isinstance(loader, ExactLoader) else ExactLoader(loader, rng_state, set_rng_state)
