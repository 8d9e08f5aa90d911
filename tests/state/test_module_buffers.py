"""A copy of a buffer is made anew when the buffer is another one, or has been written to."""

import pytest
import torch

from lightning_replica.state.module_buffers import BufferCopies

SMALL, LARGE = 10, 70_000  # compared by content, and not


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_buffer_that_is_replaced_again_and_again(size: int) -> None:
    """Each of them may get the memory, and the identity, of the one before."""
    copies = BufferCopies()
    buffers = {"x": torch.zeros(size)}
    for number in range(1, 50):
        taken = copies.take(buffers)["x"]
        assert float(taken[-1]) == number - 1
        del buffers["x"]
        buffers["x"] = torch.full((size,), float(number))


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_only_what_has_changed_is_copied(size: int) -> None:
    copies = BufferCopies()
    buffers = {"x": torch.zeros(size), "y": torch.zeros(size)}
    first = copies.take(buffers)
    buffers["x"].add_(1)
    second = copies.take(buffers)
    assert second["y"] is first["y"]
    assert second["x"] is not first["x"]
    assert float(first["x"][0]) == 0
    assert float(second["x"][0]) == 1


def test_buffers_that_come_and_go() -> None:
    copies = BufferCopies()
    assert list(copies.take({"x": torch.zeros(2)})) == ["x"]
    assert list(copies.take({"y": torch.zeros(2)})) == ["y"]
    assert copies.take({}) == {}
