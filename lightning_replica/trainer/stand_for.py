"""What a replacement leaves out, because its predecessor has done it for the whole run."""

from functools import partial

import lightning.pytorch as pl

from lightning_replica._compat.lightning import let_config_be_saved_again
from lightning_replica.state import logger_runs
from lightning_replica.trainer.session import Session


def stand_for(trainer: pl.Trainer, session: Session, writes: bool) -> None:
    """Keep a replacement, until it has joined, from repeating what its predecessor has done once.

    Args:
        trainer: The replacement's trainer.
        session: Its session.
        writes: Whether this rank's loggers write.
    """
    if trainer.num_sanity_val_steps:
        session.succession.when_joined(partial(setattr, trainer, "num_sanity_val_steps", trainer.num_sanity_val_steps))
        trainer.num_sanity_val_steps = 0
    let_config_be_saved_again(trainer)
    runs = session.succession.read_note(f"loggers/{session.fits}")
    if runs is not None:
        logger_runs.adopt(trainer.loggers, runs, writes=writes)
    logger_runs.mute(trainer.loggers)
    session.succession.when_joined(logger_runs.unmute)
