"""Generators of random numbers go back with what they spawn, in place and in a replacement."""

import random
from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch

from lightning_replica.state.objects.randomness import GENERATORS, random_state, same_random_state, set_random
from tests.state.test_reachable import Copies, put_sent


def drawn(generator: Any) -> Any:
    """Return what a generator draws, and what those draw that it spawns."""
    if isinstance(generator, random.Random):
        return generator.random()
    if isinstance(generator, torch.Generator):
        return float(torch.rand(1, generator=generator))
    if isinstance(generator, np.random.RandomState):
        return generator.rand()
    if isinstance(generator, np.random.Generator):
        return [generator.normal(), *(each.normal() for each in generator.spawn(1))]
    sequence: Any = generator.seed_seq if isinstance(generator, np.random.BitGenerator) else generator
    spawned = [each.generate_state(2).tolist() for each in sequence.spawn(2)]
    return [spawned, generator.random_raw() if isinstance(generator, np.random.BitGenerator) else 0]


MAKERS: dict[str, Callable[[], Any]] = {
    "torch": torch.Generator,
    "python": random.Random,
    "former numpy": np.random.RandomState,
    "former numpy, another": lambda: np.random.RandomState(np.random.PCG64()),
    "numpy": np.random.default_rng,
    "numpy, seeded": lambda: np.random.default_rng(3),
    "numpy, another": lambda: np.random.Generator(np.random.SFC64([1, 2])),
    "bits": np.random.Philox,
    "sequence": lambda: np.random.SeedSequence(2**70),
    "sequence of many": lambda: np.random.SeedSequence([1, 2, 3], pool_size=8),
}
EACH = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def test_all_kinds_are_here() -> None:
    assert {cls for make in MAKERS.values() for cls in GENERATORS if isinstance(make(), cls)} == set(GENERATORS)


@EACH
def test_in_place(make: Callable[[], Any]) -> None:
    generator = make()
    drawn(generator)
    state = random_state(generator)
    expected = [drawn(generator) for _ in range(3)]
    assert not same_random_state(random_state(generator), state)
    set_random(generator, state)
    assert same_random_state(random_state(generator), state)
    assert [drawn(generator) for _ in range(3)] == expected


class Module(L.LightningModule):
    def __init__(self, make: Callable[[], Any] | None) -> None:
        super().__init__()
        self.generator = make() if make is not None else None


@EACH
@pytest.mark.parametrize("there", [True, False])
def test_a_replacement(make: Callable[[], Any], there: bool) -> None:
    """It has one with another seed, or none."""
    module, other = Module(make if there else None), Module(make if there else None)
    copies = Copies(module)
    if not there:
        module.generator = make()
    drawn(module.generator)
    here = other.generator
    replaced = put_sent(other, copies.private())
    assert [drawn(other.generator) for _ in range(3)] == [drawn(module.generator) for _ in range(3)]
    assert not there or other.generator is here
    assert not replaced.inexact.known


class Shared(L.LightningModule):
    """Two generators draw from one source of bits."""

    def __init__(self, early: bool) -> None:
        super().__init__()
        self.pair: Any = self.made() if early else None

    @staticmethod
    def made() -> list[np.random.Generator]:
        bits = np.random.PCG64(1)
        return [np.random.Generator(bits), np.random.Generator(bits)]

    def advance(self) -> list[float]:
        self.pair = self.pair or self.made()
        return [each.normal() for each in self.pair]


@pytest.mark.parametrize("early", [True, False])
def test_generators_that_share_their_bits(early: bool) -> None:
    module, other = Shared(early), Shared(early)
    copies = Copies(module)
    module.advance()
    taken = copies.take()
    expected = [module.advance() for _ in range(3)]
    copies.put(taken)
    replaced = put_sent(other, copies.private())
    assert [module.advance() for _ in range(3)] == expected
    assert [other.advance() for _ in range(3)] == expected
    assert other.pair[0].bit_generator is other.pair[1].bit_generator
    assert not {**copies.inexact.known, **replaced.inexact.known}
