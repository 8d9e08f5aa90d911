"""The user's callbacks as recovery sees them: those that choose its options, those that are told of its phases.

Both are known by the names that they answer to, as Lightning knows hooks; the classes that have them are in
lightning_replica.callbacks.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl

from lightning_replica.data.deaths import worker_died
from lightning_replica.devices.exceptions import first_line
from lightning_replica.devices.interface import Device, DeviceFault
from lightning_replica.devices.registered import fault_of
from lightning_replica.errors import (
    CollectiveError,
    ConfigurationError,
    HookError,
    Interrupted,
    RecoveryError,
    TransferError,
)
from lightning_replica.points import PHASES
from lightning_replica.recovery.context import RecoveryContext
from lightning_replica.recovery.incident import Incident
from lightning_replica.recovery.options import RecoveryOptions

log = logging.getLogger(__name__)


def combined(given: RecoveryOptions, callbacks: Iterable[Any]) -> RecoveryOptions:
    """What the strategy's arguments and the callbacks in the trainer's list say together.

    An argument that has its default says nothing; a callback says all that it can.

    Raises:
        ConfigurationError: If one option is given two values, or two callbacks give the same option.
    """
    chosen: dict[str, Any] = {}
    told: dict[str, str] = {}
    for callback in callbacks:
        options = getattr(callback, "recovery_options", None)
        if options is None:
            continue
        name = type(callback).__name__
        if not given.recovery:
            raise ConfigurationError(
                f"The strategy says recovery=False, and the callback {name} sets recovery up. Leave one of them out."
            )
        for option, value in options.items():
            if option in told:
                raise ConfigurationError(
                    f"Two callbacks set {option}: {told[option]} to {chosen[option]!r}, {name} to {value!r}. Keep one."
                )
            if given.given.get(option, value) != value:
                raise ConfigurationError(
                    f"The strategy says {option}={given.given[option]!r}, the callback {name} says {option}={value!r}."
                    " Say it in one place."
                )
            chosen[option], told[option] = value, name
    return replace(given, **chosen)


def explain(error: BaseException) -> str:
    """What an exception is about, in one line."""
    return f"{type(error).__name__}: {error}"


def fault_behind(error: BaseException, device: Device) -> DeviceFault | None:
    """What of ``device``, or of another rank, made this rank fail; None if that is the user's own business."""
    fault = fault_of(error, device)
    if fault is None and worker_died(error):
        return DeviceFault("retry", first_line(error))  # every rank's may: too little memory for all of them
    if fault is None and isinstance(error, (CollectiveError, Interrupted)):
        return DeviceFault("outside", str(error))
    return fault


class Hooks:
    """Calls the hooks of a trainer's callbacks.

    Args:
        trainer: The trainer that fits.
        device: What this rank trains on.
    """

    def __init__(self, trainer: pl.Trainer, device: Device) -> None:
        self._trainer, self._device = trainer, device
        self._shown: set[str] = set()

    @property
    def any(self) -> bool:
        """Whether any callback wants to be told of phases."""
        return any(self._named(f"on_recovery_{name}") for name in PHASES)

    def phase(self, context: RecoveryContext) -> None:
        """Calls ``on_recovery_<phase>`` of every callback that has one.

        Random numbers that a hook draws leave those of the training as they are.

        Raises:
            HookError: If a hook fails by itself.
            CollectiveError: If a hook fails because a rank is lost, or by an error of the device's.
        """
        for name, hook in self._named(f"on_recovery_{context.phase}"):
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
        """Calls ``on_incident`` of every callback that has one."""
        for _, hook in self._named("on_incident"):
            random = self._device.rng_state()
            try:
                hook(self._trainer, self._trainer.lightning_module, incident)
            finally:
                self._device.set_rng_state(random)

    def _named(self, method: str) -> list[tuple[str, Callable[..., None]]]:
        callbacks: list[Any] = self._trainer.callbacks  # type: ignore[attr-defined]
        found = ((f"{type(callback).__name__}.{method}", getattr(callback, method, None)) for callback in callbacks)
        return [(name, hook) for name, hook in found if hook is not None]

    def _failed(self, rank: int, name: str, error: Exception) -> HookError:
        said = f"{name}: {explain(error)}"
        if said not in self._shown:
            log.warning("rank %d: a recovery hook failed: %s", rank, said, exc_info=error)
            self._shown.add(said)
        error.__traceback__ = None  # its frames may hold process groups
        return HookError(said)
