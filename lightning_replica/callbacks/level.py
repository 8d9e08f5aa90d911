"""The base class of the callbacks that set up a level of recovery."""

from typing import Any

from lightning_replica._compat.lightning_names import Callback
from lightning_replica.core.options import RecoveryOptions


class Level(Callback):
    """Base class that sets options of recovery as a callback instead of an argument of the strategy.

    Both ways have the same effect. It is an error if a callback and the strategy give an option different values, or if
    two callbacks give the same option. The process that starts the ranks reads these options too, so pass the
    callbacks to the Trainer: those that a module returns from ``configure_callbacks`` come too late.

    Args:
        options: The options, by their name in `RecoveryOptions`.

    Attributes:
        recovery_options: ``options``, unchanged.

    Raises:
        ConfigurationError: If a value is invalid.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        RecoveryOptions(**options)  # raises if a value is invalid
        self.recovery_options = options
