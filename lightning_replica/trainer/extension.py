"""A tool that takes part in the training of a script that does not mention it, as `lightning-replica chaos` does.

The environment variable LIGHTNING_REPLICA_EXTENSION names a module with the functions of `Extension`. So the tool
may import the trainer, and the trainer does not import the tool. Without the variable this module does nothing.
"""

import importlib
import os
from typing import Protocol, cast

from lightning_replica._compat.lightning_names import pl
from lightning_replica.core.options import RecoveryOptions
from lightning_replica.errors import ConfigurationError

VARIABLE = "LIGHTNING_REPLICA_EXTENSION"


class Extension(Protocol):
    """The functions that the module of a tool has."""

    def overridden(self, options: RecoveryOptions) -> RecoveryOptions:
        """Return the script's options, with the changes that the tool needs."""

    def enter(self, trainer: pl.Trainer) -> None:
        """Add what the tool needs to a trainer that is about to fit."""

    def resume(self, chosen: str | None) -> str | None:
        """Return from where a fit resumes that is given no checkpoint: "auto", a checkpoint, or None to begin anew.

        Args:
            chosen: The script's own choice.
        """


class Nothing:
    """The extension that changes nothing."""

    def overridden(self, options: RecoveryOptions) -> RecoveryOptions:
        """Return the script's options unchanged."""
        return options

    def enter(self, trainer: pl.Trainer) -> None:
        """Leave the trainer as it is."""

    def resume(self, chosen: str | None) -> str | None:
        """Return the script's own choice."""
        return chosen


def extension() -> Extension:
    """Return the extension that the environment names, or `Nothing` if it names none.

    Raises:
        ConfigurationError: If the module that it names cannot be imported.
    """
    name = os.environ.get(VARIABLE)
    if not name:
        return Nothing()
    try:
        return cast("Extension", importlib.import_module(name))
    except ImportError as error:
        raise ConfigurationError(f"{VARIABLE}={name} cannot be imported ({error}). Unset it to train.") from error
