"""Errors that the user has registered as faults."""

import re
from typing import get_args

from lightning_replica.devices.exceptions import first_line, with_causes
from lightning_replica.devices.interface import Device, DeviceFault, Level
from lightning_replica.errors import ConfigurationError

_registered: list[tuple[re.Pattern[str], Level]] = []


def register_fault(pattern: str, level: Level) -> None:
    """Register exceptions whose message matches ``pattern`` as faults of the machine, not of the user's code.

    A registered pattern takes precedence over the package's own rules. Call this in the script, on every rank::

        register_fault("storage .* is not reachable", "retry")

    Args:
        pattern: A regular expression, searched in the message and in the messages of the exception's causes.
        level: "retry": the step is done again. "exhausted": the same, after unused memory of the device is freed.
            "memory": the device is asked what was hit. "lost": the rank ends and is replaced. "outside": another rank
            has failed, and will report its own fault.

    Raises:
        ConfigurationError: If ``pattern`` is no regular expression, or ``level`` is not known.
    """
    if level not in get_args(Level):
        raise ConfigurationError(f"{level=} is not known. Use one of {', '.join(get_args(Level))}.")
    try:
        _registered.append((re.compile(pattern), level))
    except re.error as error:
        raise ConfigurationError(f"{pattern=} is not a regular expression: {error}.") from error


def fault_of(error: BaseException, device: Device) -> DeviceFault | None:
    """Return the fault that ``error`` reports, by the user's patterns or else by ``device``; None if it is no fault."""
    for each in with_causes(error) if _registered else ():
        for pattern, level in _registered:
            if pattern.search(str(each)):
                return DeviceFault(level, first_line(each))
    return device.classify(error)
