"""Generators of random numbers: their states as plain values, set in place, and generators made of states."""

import random
from collections.abc import Iterable
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_replica.core import plain
from lightning_replica.devices.host import HOST

RandomState: TypeAlias = Any
"""A tensor of a `torch.Generator`, a tuple of Python's, a dict of NumPy's."""

GENERATORS: Final = (
    *(torch.Generator, random.Random),
    *(np.random.Generator, np.random.RandomState, np.random.BitGenerator, np.random.SeedSequence),
)
_OF_SEQUENCE: Final = ("entropy", "spawn_key", "pool_size", "n_children_spawned")
_KIND, _SEQUENCE, _ALGORITHM = "kind", "sequence", "bit_generator"


def random_state(generator: Any) -> RandomState:
    """Return the state of one of `GENERATORS`: what it draws next, and what it spawns next."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.SeedSequence):
        return {_KIND: "SeedSequence", **_sequence_state(generator)}
    if isinstance(generator, np.random.Generator):
        return {_KIND: "Generator", **_bit_generator_state(generator.bit_generator)}
    if isinstance(generator, np.random.BitGenerator):
        return {_KIND: "BitGenerator", **_bit_generator_state(generator)}
    if isinstance(generator, np.random.RandomState):
        return {_KIND: "RandomState", **generator.get_state(legacy=False)}
    return generator.get_state()


def set_random(generator: Any, state: RandomState) -> None:
    """Set one of `GENERATORS` to a former state.

    Raises:
        ValueError: If this version of NumPy does not let a seed sequence be set.
    """
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.SeedSequence):
        _set_sequence(generator, state)
    elif isinstance(generator, np.random.Generator):
        _set_bit_generator(generator.bit_generator, state)
    elif isinstance(generator, np.random.BitGenerator):
        _set_bit_generator(generator, state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state({key: value for key, value in state.items() if key != _KIND})
    else:
        generator.set_state(state)


def bits_of(generator: Any) -> np.random.BitGenerator | None:
    """Return what one of NumPy's generators draws from; None for all others."""
    return generator.bit_generator if isinstance(generator, np.random.Generator) else None


def same_random_state(a: RandomState, b: RandomState) -> bool:
    """Return whether two results of `random_state` are the same."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, dict):
        return all(same_random_state(value, b.get(key)) for key, value in a.items())
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same_random_state, a, b))
    return bool(a == b)


def generator_of(state: RandomState, current: Any) -> Any:
    """Return the generator that is there, with the state; a new one where there is none of that kind.

    What cannot be made is left as it is: a generator of a device that this process does not have.
    """
    if isinstance(state, Tensor):
        generator: Any = _torch_generator(state, current)
    elif isinstance(state, dict):
        generator = current if _fits(current, state) else _of_numpy(state)
    else:
        generator = current if isinstance(current, random.Random) else random.Random()
    if generator is None:
        return current
    set_random(generator, state)
    return generator


def _sequence_state(sequence: np.random.SeedSequence) -> dict[str, Any]:
    state = dict(sequence.state)
    entropy: Any = state["entropy"]  # as it was given
    spawn_key: Any = state["spawn_key"]
    if entropy is not None:
        entropy = tuple(map(int, entropy)) if isinstance(entropy, Iterable) else int(entropy)
    return {**state, "entropy": entropy, "spawn_key": tuple(map(int, spawn_key))}


def _set_sequence(sequence: np.random.SeedSequence, state: dict[str, Any]) -> None:
    wanted = _sequence_of(state)
    if _sequence_state(sequence) == _sequence_state(wanted):
        return
    _, _, parts = wanted.__reduce__()  # type: ignore[str-unpack]
    sequence.__setstate__(parts)  # type: ignore[attr-defined]
    if _sequence_state(sequence) != _sequence_state(wanted):
        raise ValueError("this version of NumPy does not let a SeedSequence be set to a former state")


def _sequence_of(state: dict[str, Any]) -> np.random.SeedSequence:
    return np.random.SeedSequence(**{name: state[name] for name in _OF_SEQUENCE})


def _bit_generator_state(generator: np.random.BitGenerator) -> dict[str, Any]:
    sequence = generator.seed_seq
    spawns = _sequence_state(sequence) if isinstance(sequence, np.random.SeedSequence) else None
    return {**generator.state, _SEQUENCE: spawns}


def _set_bit_generator(generator: np.random.BitGenerator, state: dict[str, Any]) -> None:
    generator.state = {key: value for key, value in state.items() if key not in (_KIND, _SEQUENCE)}
    if state[_SEQUENCE] is not None and isinstance(generator.seed_seq, np.random.SeedSequence):
        _set_sequence(generator.seed_seq, state[_SEQUENCE])


def _fits(current: Any, state: dict[str, Any]) -> bool:
    """Return whether a generator is of the kind that a state belongs to."""
    if not isinstance(current, getattr(np.random, state[_KIND])):
        return False
    return bool(random_state(current).get(_ALGORITHM) == state.get(_ALGORITHM))


def _of_numpy(state: dict[str, Any]) -> Any:
    if state[_KIND] == "SeedSequence":
        return _sequence_of(state)
    if state[_KIND] == "RandomState":
        return np.random.RandomState(getattr(np.random, state[_ALGORITHM])())
    sequence = None if state[_SEQUENCE] is None else _sequence_of(state[_SEQUENCE])
    generator = getattr(np.random, state[_ALGORITHM])(sequence)
    return generator if state[_KIND] == "BitGenerator" else np.random.Generator(generator)


def _torch_generator(state: Tensor, current: Any) -> torch.Generator | None:
    """Return a generator whose states are as large as ``state``, which differs from device to device."""
    if isinstance(current, torch.Generator) and current.get_state().shape == state.shape:
        return current
    new = (torch.Generator(device) for device in (HOST, plain.own_device()))
    return next((generator for generator in new if generator.get_state().shape == state.shape), None)
