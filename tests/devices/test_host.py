"""What every rank has, whatever it trains on."""

import random
import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_replica.devices.host import added_to, rng_state, same_bits, same_bytes, set_rng_state


def draw() -> list[float]:
    return [
        float(torch.randn(1)),
        float(torch.rand(1)),
        float(np.random.standard_normal()),
        float(np.random.rand()),
        random.random(),
        random.gauss(0, 1),
    ]


@pytest.mark.parametrize("added", [b"", b"what a device adds"])
def test_every_generator_goes_on_where_it_was(added: bytes) -> None:
    before = rng_state()
    try:
        for _ in range(3):  # an odd number of gaussians leaves one cached in numpy and one in python
            draw()
            state = rng_state()
            expected = [draw(), draw()]
            torch.manual_seed(99)
            np.random.seed(99)
            random.seed(99)
            set_rng_state(state + added)
            assert rng_state() == state
            assert added_to(state + added) == added
            assert [draw(), draw()] == expected
    finally:
        set_rng_state(before)


@pytest.mark.parametrize("same", [same_bits, same_bytes])
def test_bits_are_compared_not_numbers(same: Callable[[Tensor, Tensor], bool]) -> None:
    zero, nan = torch.zeros(3, 2), torch.full((3, 2), torch.nan)
    assert same(zero, zero.clone())
    assert same(nan, nan.clone())
    assert not same(zero, -zero)
    assert not same(zero, nan)
    assert same(torch.tensor(1.5), torch.tensor(1.5))
    assert same(torch.zeros(0), torch.zeros(0))
    assert not same(zero, zero[:2])


def numpys(state: bytes) -> tuple[int, int, float]:
    """The position of numpy's generator, and the half of a pair of normal numbers that it keeps."""
    start = 16 + int.from_bytes(state[:8], "little")
    position, kept, value = struct.unpack_from("<qqd", state, start)
    return position, kept, value


@pytest.mark.parametrize("drawn_before", [0, 1, 2, 624])
def test_what_numpy_has_drawn_is_seen(drawn_before: int) -> None:
    """Its words are looked at first, which do not tell whether it keeps a number."""
    before = rng_state()
    try:
        np.random.seed(7)
        np.random.randn(drawn_before)
        states = []
        for _ in range(4):
            _, _, position, kept, value = np.random.get_state(legacy=True)
            states.append(rng_state())
            assert numpys(states[-1]) == (position, kept, value)
            np.random.randn()
        assert len(set(states)) == 4
        np.random.seed(7)
        np.random.randn(drawn_before)
        assert rng_state() == states[0]
        np.random.set_state(np.random.RandomState(8).get_state())
        assert rng_state() not in states
    finally:
        set_rng_state(before)
