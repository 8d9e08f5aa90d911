"""Checks of arguments, each with one clear error."""

import itertools
import math

from lightning_replica.errors import ConfigurationError


def whole(least: int, **numbers: object) -> None:
    """Refuses what is not a whole number of at least ``least``."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigurationError(f"{name}={value!r} must be a whole number, {least} or more.")


def seconds(**durations: object) -> None:
    """Refuses what is not a positive number of seconds."""
    for name, value in durations.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ConfigurationError(f"{name}={value!r} must be a number of seconds, more than 0.")


def positive(name: str, value: object) -> None:
    """Refuses what is no finite number above 0; None is none."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (number and 0 < value < math.inf):  # type: ignore[operator]
        raise ConfigurationError(f"{name}={value!r} must be a number above 0.")


def order(**numbers: float) -> None:
    """Refuses numbers of which one is more than the next."""
    for (name, value), (other, more) in itertools.pairwise(numbers.items()):
        if value > more:
            raise ConfigurationError(f"{name}={value!r} must not be more than {other}={more!r}.")


def choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Refuses what is none of ``choices``."""
    if value not in choices:
        raise ConfigurationError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}.")
