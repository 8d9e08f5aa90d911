"""A copy of a buffer is made anew when the buffer is another one, or holds something else."""

import pickle
import re
from collections.abc import Callable

import pytest
import torch

from lightning_replica.core import plain
from lightning_replica.core.inexact import Inexact, Scope
from lightning_replica.state.module_buffers import OWN_BYTES, BufferCopies

SMALL, LARGE = 10, 3_000_000  # compared in every snapshot, and in the first windows and then in turn
WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "counted": lambda tensor: tensor.add_(1),
    "data": lambda tensor: tensor.data.add_(1),
    "numpy": lambda tensor: tensor.numpy().__iadd__(1),
}


def copies_of() -> BufferCopies:
    def never(name: str, why: str, scope: Scope = "fault") -> None:
        pytest.fail(f"{scope}: {name}: {why}")

    return BufferCopies(never)


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_buffer_that_is_replaced_again_and_again(size: int) -> None:
    """Each of them may get the memory, and the identity, of the one before."""
    copies = copies_of()
    buffers = {"x": torch.zeros(size)}
    for number in range(1, 50):
        taken = copies.take(buffers)["x"]
        assert float(taken[-1]) == number - 1
        del buffers["x"]
        buffers["x"] = torch.full((size,), float(number))


@pytest.mark.parametrize("way", WRITES)
@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_only_what_has_changed_is_copied(size: int, way: str) -> None:
    copies = copies_of()
    buffers = {"x": torch.zeros(size), "y": torch.zeros(size)}
    first = copies.take(buffers)
    WRITES[way](buffers["x"])
    second = copies.take(buffers)
    assert second["y"] is first["y"]
    assert second["x"] is not first["x"]
    assert float(first["x"][0]) == 0
    assert float(second["x"][0]) == 1


def test_buffers_that_come_and_go() -> None:
    copies = copies_of()
    assert list(copies.take({"x": torch.zeros(2)})) == ["x"]
    assert list(copies.take({"y": torch.zeros(2)})) == ["y"]
    assert copies.take({}) == {}


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_what_was_written_to_once_is_compared_for_ever(size: int) -> None:
    """As a codebook, from the first step on."""
    copies = copies_of()
    buffers = {"x": torch.zeros(size)}
    for number in range(20):
        assert float(copies.take(buffers)["x"].max()) == number
        buffers["x"].data[size // 2] += 1
        assert float(copies.take(buffers, window=False)["x"].max()) == number + 1


def test_a_write_that_is_found_late() -> None:
    inexact = Inexact()
    copies = BufferCopies(inexact.report)
    buffers = {"x": torch.zeros(LARGE), "y": torch.zeros(LARGE)}
    for _ in range(10):
        copies.take(buffers)
    buffers["x"].data[LARGE // 2] = 1
    steps = 0
    while float(copies.take(buffers)["x"].max()) == 0:
        steps += 1
        assert steps < 100
    ((name, finding),) = inexact.known.items()
    assert (name, finding.scope) == ("module.x", "once")
    (windows,) = re.findall(r"in one of the last (\d+) steps", finding.why)
    assert int(windows) <= 100
    buffers["y"].data[7] = 1
    assert float(copies.take(buffers, whole=True)["y"][7]) == 1  # before the last checkpoint of a run


def test_going_back() -> None:
    copies = copies_of()
    buffers = {"x": torch.zeros(LARGE)}
    taken = copies.take(buffers)
    buffers["x"].data += 1
    copies.put_back(buffers, taken, {})
    assert float(buffers["x"].max()) == 0


def test_a_copy_of_another_process_leaves_a_buffer_its_memory() -> None:
    """On a device, a buffer would lie in the host's memory from then on."""
    sent = pickle.dumps(copies_of().take({"x": torch.full((3,), 7.0)}))
    buffer = torch.zeros(3)
    address = buffer.data_ptr()
    copies_of().put_back({"x": buffer}, pickle.loads(sent), {})
    assert (buffer.data_ptr(), buffer.tolist()) == (address, [7, 7, 7])


def test_what_differs_from_the_shared_buffers_is_a_ranks_own() -> None:
    copies = copies_of()
    buffers = {"x": torch.zeros(3), "y": torch.zeros(3)}
    shared = copies.take(buffers)
    copies.put_back(buffers, shared, {})
    assert copies.packed() == b""
    buffers["x"] += 1
    assert copies.take(buffers)["x"] is shared["x"]
    own = plain.unpack(copies.packed())
    assert (list(own), float(own["x"][0])) == (["x"], 1)
    buffers["x"] += 1
    copies.put_back(buffers, shared, own)
    assert float(buffers["x"][0]) == 1
    copies.give(buffers)
    assert float(buffers["x"][0]) == 0
    copies.take(buffers)
    assert copies.own == {}


def test_what_peers_do_not_keep_is_named() -> None:
    inexact, buffer = Inexact(), torch.zeros(OWN_BYTES // 4 + 1)
    copies = BufferCopies(inexact.report)
    copies.put_back({"x": buffer}, copies.take({"x": buffer}), {})
    assert copies.packed() == b""
    assert inexact.known == {}
    copies.take({"x": buffer + 1})
    assert copies.packed() == b""
    finding = inexact.known["module.x"]
    assert finding.scope == "replacement"
    assert "they are large" in finding.why


def test_a_buffer_that_is_trained_by_hand_is_so_with_the_content_of_another_rank() -> None:
    copies, buffer = copies_of(), torch.zeros(2, requires_grad=True)
    copies.take({"x": buffer})
    buffer.grad = torch.ones(2)
    copies.shared["x"] = torch.ones(2)  # as a broadcast brings it
    copies.give({"x": buffer})
    assert buffer.tolist() == [1, 1]
    assert buffer.requires_grad
    assert buffer.grad.tolist() == [1, 1]
