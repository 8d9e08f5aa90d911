"""Checks of arguments, each of which raises a `ConfigurationError`."""

import itertools
import math

from lightning_replica.errors import ConfigurationError


def whole(least: int, **numbers: object) -> None:
    """Refuse values that are not whole numbers of at least ``least``."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigurationError(f"{name}={value!r} must be a whole number, {least} or more.")


def seconds(**durations: object) -> None:
    """Refuse values that are not positive numbers of seconds."""
    for name, value in durations.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ConfigurationError(f"{name}={value!r} must be a number of seconds, more than 0.")


def positive(name: str, value: object) -> None:
    """Refuse a value that is neither None nor a finite number above 0."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (number and 0 < value < math.inf):  # type: ignore[operator]
        raise ConfigurationError(f"{name}={value!r} must be a number above 0.")


def order(**numbers: float) -> None:
    """Refuse numbers that are not in ascending order; equal numbers are allowed."""
    for (name, value), (other, more) in itertools.pairwise(numbers.items()):
        if value > more:
            raise ConfigurationError(f"{name}={value!r} must not be more than {other}={more!r}.")


def choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Refuse a value that is not among ``choices``."""
    if value not in choices:
        raise ConfigurationError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}.")
