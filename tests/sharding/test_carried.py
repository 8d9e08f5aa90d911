"""Which gradients that lie there before a batch count as needed, and so belong in a checkpoint."""

from itertools import product

import pytest

from lightning_replica.sharding.carried import Carried

SMALL, LARGE = 1, 2**27


def batch(carried: Carried, present: bool, removes: bool, steps: bool = True) -> bool:
    """One batch of a single parameter; returns whether it has a gradient afterwards."""
    carried.begin_window([present])
    carried.before_backward([present and not removes])
    if steps:
        carried.step([True])
    return True


@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
def test_a_step_that_removes_them_first_does_not_need_them(nbytes: int) -> None:
    carried, present = Carried(nbytes), False
    for number in range(10):
        assert carried.may_be_needed or number > (1 if nbytes == LARGE else 8)
        present = batch(carried, present, removes=True)
    assert not carried.may_be_needed


@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
@pytest.mark.parametrize("every", range(2, 8))
def test_steps_that_add_need_them(nbytes: int, every: int) -> None:
    """As with a training step that removes them every few batches, or that steps every few batches."""
    removes, steps = Carried(nbytes), Carried(nbytes)
    there, left = False, False
    for number in range(20):
        there = batch(removes, there, removes=number % every == 0)
        left = batch(steps, left, removes=False, steps=number % every == every - 1)
        left &= number % every != every - 1
        assert removes.may_be_needed
        assert steps.may_be_needed


def test_gradients_of_another_loss_that_are_removed_are_not_needed() -> None:
    """The generator's loss adds to what lies in the critic, which removes it before its own."""
    critic = Carried(LARGE)
    for _ in range(3):
        critic.begin_window([True, True])
        critic.before_backward([True, True])
        critic.before_backward([False, False])
        critic.step([True, True])
    assert not critic.may_be_needed


@pytest.mark.parametrize("seen", [each for length in range(1, 4) for each in product([False, True], repeat=length)])
def test_one_that_is_needed_is_enough(seen: tuple[bool, ...]) -> None:
    """By parameter: whether it was removed before the pass."""
    carried = Carried(LARGE)
    carried.begin_window([True] * len(seen))
    carried.before_backward([not removed for removed in seen])
    carried.step([True] * len(seen))
    assert carried.may_be_needed == (not all(seen))
