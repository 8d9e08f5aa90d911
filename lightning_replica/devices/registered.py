"""Errors whose meaning a user has told."""

import re
from typing import get_args

from lightning_replica.devices.exceptions import first_line, with_causes
from lightning_replica.devices.interface import Device, DeviceFault, Level
from lightning_replica.errors import ConfigurationError

_registered: list[tuple[re.Pattern[str], Level]] = []


def register_fault(pattern: str, level: Level) -> None:
    """Says what an exception is about whose message holds ``pattern``: not the user's code, but the machine.

    Before it, what the package knows of errors itself counts for nothing. Call it in the script, on every rank::

        register_fault("storage .* is not reachable", "retry")

    Args:
        pattern: A regular expression, looked for in the message and in those of the exceptions that it came from.
        level: "retry": the step is done again. "exhausted": likewise, once unused memory of the device is given back.
            "memory": the device is asked what was hit. "lost": the rank ends and is replaced. "outside": another rank
            has failed, and will say how.

    Raises:
        ConfigurationError: If one of them makes no sense.
    """
    if level not in get_args(Level):
        raise ConfigurationError(f"{level=} is not known. Use one of {', '.join(get_args(Level))}.")
    try:
        _registered.append((re.compile(pattern), level))
    except re.error as error:
        raise ConfigurationError(f"{pattern=} is no regular expression: {error}.") from error


def fault_of(error: BaseException, device: Device) -> DeviceFault | None:
    """What ``error`` says of ``device``, by the user's word or by its own; None if it says nothing."""
    for each in with_causes(error) if _registered else ():
        for pattern, level in _registered:
            if pattern.search(str(each)):
                return DeviceFault(level, first_line(each))
    return device.classify(error)
