"""The user's callbacks as recovery sees them: those that set its options, and those that it calls in its phases.

Recovery finds both by the names of their attributes and methods, as Lightning finds hooks. The classes that have them
are in lightning_replica.callbacks.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from lightning_replica._compat.lightning_names import pl
from lightning_replica.core.options import RecoveryOptions
from lightning_replica.core.points import PHASES
from lightning_replica.devices.exceptions import explain
from lightning_replica.devices.interface import Device
from lightning_replica.errors import (
    CollectiveError,
    ConfigurationError,
    HookError,
    RecoveryError,
    TransferError,
)
from lightning_replica.recovery.context import RecoveryContext
from lightning_replica.recovery.diagnosis import fault_behind
from lightning_replica.recovery.incident import Incident

log = logging.getLogger(__name__)


def combined(given: RecoveryOptions, callbacks: Iterable[Any]) -> RecoveryOptions:
    """Return the options that the strategy's arguments and the trainer's callbacks set together.

    An argument that has its default value sets nothing. A callback sets every option in its ``recovery_options``.

    Raises:
        ConfigurationError: If one option is given two values, if two callbacks set the same option, or if a callback
            sets recovery up although the strategy turns it off.
    """
    chosen: dict[str, Any] = {}
    set_by: dict[str, str] = {}
    for callback in callbacks:
        options = getattr(callback, "recovery_options", None)
        if options is None:
            continue
        name = type(callback).__name__
        if not given.recovery:
            raise ConfigurationError(
                f"The strategy has recovery=False, but the callback {name} configures recovery. Remove one of them."
            )
        for option, value in options.items():
            if option in set_by:
                raise ConfigurationError(
                    f"Two callbacks set {option}: {set_by[option]} to {chosen[option]!r}, {name} to {value!r}."
                    " Keep one."
                )
            if given.given.get(option, value) != value:
                raise ConfigurationError(
                    f"The strategy sets {option}={given.given[option]!r}, but the callback {name} sets"
                    f" {option}={value!r}. Set it in one place."
                )
            chosen[option], set_by[option] = value, name
    return replace(given, **chosen)


def named_hooks(trainer: pl.Trainer, method: str) -> list[tuple[str, Callable[..., None]]]:
    """Return the hook ``method`` of every callback that has it, with a name for messages."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    found = ((f"{type(callback).__name__}.{method}", getattr(callback, method, None)) for callback in callbacks)
    return [(name, hook) for name, hook in found if hook is not None]


class Hooks:
    """Calls the recovery hooks of a trainer's callbacks.

    Args:
        trainer: The trainer that fits.
        device: The device that this rank trains on.
    """

    def __init__(self, trainer: pl.Trainer, device: Device) -> None:
        self._trainer, self._device = trainer, device
        self._shown: set[str] = set()

    @property
    def any(self) -> bool:
        """Whether any callback has a hook for a phase of recovery."""
        return any(named_hooks(self._trainer, f"on_recovery_{name}") for name in PHASES)

    def phase(self, context: RecoveryContext) -> None:
        """Call ``on_recovery_<phase>`` of every callback that has it.

        The random state is put back after each hook, so a hook that draws random numbers does not change training.

        Raises:
            HookError: If a hook fails by itself.
            CollectiveError: If a hook fails because a rank is lost, or because of a device error.
        """
        for name, hook in named_hooks(self._trainer, f"on_recovery_{context.phase}"):
            random = self._device.rng_state()
            try:
                hook(self._trainer, self._trainer.lightning_module, context)
            except (RecoveryError, TransferError):
                raise
            except Exception as error:
                if fault_behind(error, self._device) is not None:
                    raise CollectiveError(f"{name}: {error}") from error
                raise self._failed(context.rank, name, error) from None
            finally:
                self._device.set_rng_state(random)

    def incident(self, incident: Incident) -> None:
        """Call ``on_incident`` of every callback that has it.

        One that fails is shown, and does not disturb the training: it is told of what is over.

        Raises:
            Exception: The error of a hook that fails because a rank or the device is lost meanwhile.
        """
        for name, hook in named_hooks(self._trainer, "on_incident"):
            random = self._device.rng_state()
            try:
                hook(self._trainer, self._trainer.lightning_module, incident)
            except Exception as error:
                if fault_behind(error, self._device) is not None:
                    raise
                self._show(f"{name}: {explain(error)}", "a callback failed when it was told of an incident", error)
            finally:
                self._device.set_rng_state(random)

    def _failed(self, rank: int, name: str, error: Exception) -> HookError:
        said = f"{name}: {explain(error)}"
        self._show(said, f"rank {rank}: a recovery hook failed", error)
        return HookError(said)

    def _show(self, said: str, what: str, error: Exception) -> None:
        """Log an error once."""
        if said not in self._shown:
            log.warning("%s: %s", what, said, exc_info=error)
            self._shown.add(said)
        error.__traceback__ = None  # its frames may hold process groups
