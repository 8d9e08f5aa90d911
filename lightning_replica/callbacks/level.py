"""What the callbacks have in common that set up a level of recovery."""

from typing import Any

from lightning.pytorch.callbacks import Callback

from lightning_replica.recovery.options import RecoveryOptions


class Level(Callback):
    """Chooses options of recovery, from the trainer's list of callbacks instead of the strategy's arguments.

    Both say the same; an option that both give two values is an error, and so are two callbacks that give the same
    option. The process that starts the ranks reads them too, so give them to the Trainer: those that a module returns
    from ``configure_callbacks`` come too late.

    Args:
        options: The options, by their name in `RecoveryOptions`.

    Attributes:
        recovery_options: The same.

    Raises:
        ConfigurationError: If a value makes no sense.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        RecoveryOptions(**options)  # raises
        self.recovery_options = options
