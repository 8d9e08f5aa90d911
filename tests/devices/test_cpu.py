"""The random state; `abort_group` is tested with what it stands on, in tests/sharding/test_collectives.py."""

import random

import numpy as np
import torch

from lightning_replica.devices.cpu import is_collective_failure, rng_state, set_rng_state


def draw() -> list[float]:
    return [
        float(torch.randn(1)),
        float(torch.rand(1)),
        float(np.random.standard_normal()),
        float(np.random.rand()),
        random.random(),
        random.gauss(0, 1),
    ]


def test_every_generator_goes_on_where_it_was() -> None:
    before = rng_state()
    try:
        for _ in range(3):  # an odd number of gaussians leaves one cached in numpy and one in python
            draw()
            state = rng_state()
            expected = [draw(), draw()]
            torch.manual_seed(99)
            np.random.seed(99)
            random.seed(99)
            set_rng_state(state)
            assert rng_state() == state
            assert [draw(), draw()] == expected
    finally:
        set_rng_state(before)


def test_a_users_own_error_is_not_a_collective_failure() -> None:
    assert not is_collective_failure(RuntimeError("shapes (3,4) and (5,6) not aligned"))
    assert not is_collective_failure(KeyError("gloo"))
    assert is_collective_failure(RuntimeError("Application timeout caused pair closure"))
