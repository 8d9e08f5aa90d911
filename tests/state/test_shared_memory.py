"""Tensors and arrays that lie in one memory do so in a replacement, whether its script has made them or not."""

from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch

from lightning_replica.state.objects.shared_memory import Sharing
from tests.state.test_reachable import Copies, put_sent


def torch_views() -> list[Any]:
    whole = torch.zeros(12)
    return [whole, whole[2:5], whole.view(3, 4).T, whole[::2], whole[3]]


def views_first() -> list[Any]:
    return torch_views()[::-1]


def numpy_views() -> list[Any]:
    whole = np.zeros(12)
    return [whole, whole[1:3], whole[::-2], whole.reshape(3, 4)[:, 1]]


def of_both() -> list[Any]:
    array = np.zeros(12)
    tensor = torch.from_numpy(array)
    return [array, tensor, tensor[2:4], array[1:3], tensor[4:].numpy()]


def halves_of_what_is_gone() -> list[Any]:
    return [*torch.zeros(4, 6).chunk(2, dim=1), *torch.zeros(8).chunk(2)]


def of_other_dtypes() -> list[Any]:
    whole = torch.zeros(8)
    return [whole, whole.view(torch.int32)[2:], whole.view(torch.uint8)[::3], whole.view(torch.complex64)]


def times() -> list[Any]:
    whole = np.zeros(6, "datetime64[s]")
    return [whole, whole[2:], whole.view("int64")]


def with_a_parameter() -> list[Any]:
    whole = torch.zeros(6)
    return [torch.nn.Parameter(whole[:4], requires_grad=False), whole]


MAKERS = (
    *(torch_views, views_first, numpy_views, of_both, halves_of_what_is_gone, of_other_dtypes, times),
    with_a_parameter,
)


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.held: list[Any] = []


def bytes_of(values: list[Any]) -> list[bytes]:
    return [np.ascontiguousarray(each).tobytes() for each in values]


def written(values: list[Any], number: int) -> list[bytes]:
    """Write into one of them, and return what all of them hold then."""
    here = values[number]
    here.fill_(number + 3) if isinstance(here, torch.Tensor) else here.fill(number + 3)
    return bytes_of(values)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("there", range(3))
def test_a_replacement(make: Callable[[], list[Any]], there: int) -> None:
    """It has none of them, the first two, or all."""
    module, other = Module(), Module()
    copies = Copies(module)
    module.held = make()
    written(module.held, 0)
    other.held = make()[: (0, 2, len(module.held))[there]]
    replaced = put_sent(other, copies.private())
    assert bytes_of(other.held) == bytes_of(module.held)
    for number in range(len(module.held)):
        assert written(other.held, number) == written(module.held, number)
    assert not replaced.inexact.known


def test_those_that_are_here_share_nothing() -> None:
    module, other = Module(), Module()
    copies = Copies(module)
    module.held = torch_views()
    other.held = [each.clone() for each in torch_views()]
    put_sent(other, copies.private())
    assert written(other.held, 1) == written(module.held, 1)


def test_a_memory_without_room_for_the_others() -> None:
    module, other = Module(), Module()
    copies = Copies(module)
    whole = torch.arange(8.0)
    module.held, other.held = [whole[:2], whole], [torch.zeros(2), torch.zeros(8)]
    replaced = put_sent(other, copies.private())
    assert written(other.held, 0) == written(module.held, 0)
    assert not replaced.inexact.known


def test_a_place_that_the_dtype_cannot_have_is_named() -> None:
    module, other = Module(), Module()
    copies = Copies(module)
    array = np.zeros(16, np.uint8)
    module.held = [array, torch.from_numpy(array[:8]).view(torch.int32)]
    other.held = [np.zeros(17, np.uint8)[1:], None]
    found = put_sent(other, copies.private()).inexact.known
    assert found["module.held[1]"].why == "it shares memory with another tensor or array, but not in this replacement"
    assert bytes_of(other.held) == bytes_of(module.held)


def test_an_expanded_tensor() -> None:
    module, other = Module(), Module()
    copies = Copies(module)
    module.held, other.held = [torch.ones(1).expand(4)], [torch.zeros(1).expand(4)]
    replaced = put_sent(other, copies.private())
    assert bytes_of(other.held) == bytes_of(module.held)
    assert not replaced.inexact.known


class Views(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(2, 2)
        self.whole, self.array = torch.zeros(4), np.zeros(4)
        self.part, self.part_of_array = self.whole[:2], self.array[1:3]
        self.former, self.mean = self.lin.weight.detach(), torch.zeros(3)
        self.wide = self.mean.expand(2, 3)
        self.fixed = np.frombuffer(b"abcd", dtype=np.uint8)


def test_what_was_a_view_when_training_began() -> None:
    """Nothing is written through it."""
    torch.manual_seed(1)
    module, other = Views(), Views()
    weight = other.lin.weight.detach().clone()
    copies = Copies(module)
    module.part, module.part_of_array = module.part + 5, module.part_of_array + 5
    module.former = module.former.clone() + 1
    replaced = put_sent(other, copies.private())
    for name in ("part", "part_of_array", "former", "whole", "array"):
        assert bytes_of([getattr(other, name)]) == bytes_of([getattr(module, name)])
    assert torch.equal(other.lin.weight.detach(), weight)
    assert not replaced.inexact.known


def test_an_expanded_tensor_follows_what_it_shows() -> None:
    module, other = Views(), Views()
    copies = Copies(module)
    module.mean += 2
    put_sent(other, copies.private())
    assert bytes_of([other.mean, other.wide]) == bytes_of([module.mean, module.wide])
    other.mean += 1
    assert float(other.wide.sum()) == 18


class OverWeights(L.LightningModule):
    def __init__(self, made: bool) -> None:
        super().__init__()
        self.lin, self.here = torch.nn.Linear(3, 2), made
        self.register_buffer("seen", torch.zeros(3))
        self.arrays: list[Any] = self.make() if made else []

    def make(self) -> list[Any]:
        weight = self.lin.weight.detach().numpy()
        return [weight, weight[1, ::2], self.get_buffer("seen").numpy()]


@pytest.mark.parametrize("made", [True, False])
def test_arrays_in_the_memory_of_weights(made: bool) -> None:
    module, other = OverWeights(made), OverWeights(made)
    copies = Copies(module)
    if not made:
        module.arrays = module.make()
    module.lin.weight.data += 1
    taken = copies.take()
    module.lin.weight.data += 1
    copies.put(taken)
    with torch.no_grad():
        other.lin.weight.copy_(module.lin.weight)  # other code does it
    weight = other.lin.weight.detach().clone()
    replaced = put_sent(other, copies.private())
    assert torch.equal(other.lin.weight, weight)
    assert bytes_of(other.arrays) == bytes_of(module.arrays)
    other.lin.weight.data += 1
    other.get_buffer("seen").add_(2)
    assert other.arrays[0].sum() == other.lin.weight.sum().item()
    assert [float(each) for each in other.arrays[1]] == other.lin.weight[1, ::2].tolist()
    assert other.arrays[2].sum() == 6
    assert not replaced.inexact.known


def test_what_is_not_contiguous_stays_so() -> None:
    """Kernels may sum in another order for other strides."""
    module, other = Module(), Module()
    copies = Copies(module)
    module.held = [
        torch.rand(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        torch.rand(3, 4).T,
        np.asfortranarray(np.random.rand(3, 4)),
        torch.rand(6)[::2],
    ]
    put_sent(other, copies.private())
    assert bytes_of(other.held) == bytes_of(module.held)
    assert [strides_of(each) for each in other.held] == [strides_of(each) for each in module.held]


def strides_of(value: Any) -> tuple[int, ...]:
    found: tuple[int, ...] = value.stride() if isinstance(value, torch.Tensor) else value.strides
    return found


def test_an_array_that_cannot_be_written_to() -> None:
    module, other = Views(), Views()
    copies = Copies(module)
    module.fixed = np.frombuffer(b"bcde", dtype=np.uint8)
    replaced = put_sent(other, copies.private())
    assert bytes_of([other.fixed]) == [b"bcde"]
    assert not replaced.inexact.known


def test_many_views_take_no_long_time() -> None:
    sharing, whole = Sharing(), torch.zeros(100_000)
    sent: list[list[Any]] = [sharing.add(whole[number : number + 2], []) for number in range(99_998)]
    sharing.tell()  # with the square of their number, this would take half an hour
    assert all(each[0][2] == 4 * number for number, each in enumerate(sent))


class Late(L.LightningModule):
    """A step makes views of what has not changed since training began."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.whole: Any = whole
        self.parts: list[Any] = []

    def write(self) -> list[bytes]:
        self.parts[0][...] += 1
        self.whole[3] += 2
        return bytes_of([self.whole, *self.parts])


@pytest.mark.parametrize("whole", [torch.zeros, np.zeros])
@pytest.mark.parametrize("more", [True, False])
def test_views_of_what_has_not_changed(whole: Callable[[int], Any], more: bool) -> None:
    module, other = Late(whole(12)), Late(whole(12))
    copies = Copies(module)
    module.parts = [module.whole[2:5], module.whole[::2]] if more else [module.whole[2:5]]
    sent = copies.private()
    assert [name for name, _ in sent[0][1]] == ["parts"]
    replaced = put_sent(other, sent)
    assert [other.write() for _ in range(3)] == [module.write() for _ in range(3)]
    assert not replaced.inexact.known


def test_a_view_of_what_is_not_there() -> None:
    module, other = Late(torch.zeros(12)), Late([])
    copies = Copies(module)
    module.parts = [module.whole[2:5]]
    replaced = put_sent(other, copies.private())
    assert other.parts[0].tolist() == [0, 0, 0]
    assert "lies in the memory of module.whole" in replaced.inexact.known["module.parts[0]"].why


def test_a_view_of_what_is_gone_meanwhile() -> None:
    """Another tensor takes the place of the one that it shows."""
    module, other = Late(torch.zeros(4)), Late(torch.zeros(4))
    copies = Copies(module)
    module.parts = [module.whole[:2]]
    module.whole = torch.ones(4)
    put_sent(other, copies.private())
    assert bytes_of([other.whole, *other.parts]) == bytes_of([module.whole, *module.parts])
    assert other.write() == module.write()


def test_another_part_of_a_memory_than_the_last_one() -> None:
    module, other = Late(torch.zeros(8)), Late(torch.zeros(8))
    for each in (module, other):
        each.tail = each.whole[4:]
    copies = Copies(module)
    module.parts = [module.whole[:2]]
    replaced = put_sent(other, copies.private())
    assert other.write() == module.write()
    assert not replaced.inexact.known
