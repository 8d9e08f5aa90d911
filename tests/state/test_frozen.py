"""Which parameters that nobody trains are copied, and how they go back."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_replica.errors import RecoveryError
from lightning_replica.state import frozen
from lightning_replica.state.frozen import FrozenCopies


class Model(nn.Module):
    """A large backbone that nobody writes to, a small head that is trained, and a teacher that follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.ModuleList(nn.Linear(100, 100) for _ in range(10))
        self.head, self.teacher = nn.Linear(100, 3), nn.Linear(100, 3)

    def follow(self) -> None:
        self.teacher.weight.data.mul_(0.9)

    def copies(self) -> FrozenCopies:
        return FrozenCopies(lambda: list(self.head.parameters()))


def window(model: Model, copies: FrozenCopies) -> frozen.FrozenValues:
    return copies.take(list(model.parameters()), window=True)


def test_only_what_changes_is_copied_for_long() -> None:
    model = Model()
    copies = model.copies()
    taken = []
    for _ in range(6):
        taken = window(model, copies)
        model.follow()
    (parameter, before), later = taken[0], model.teacher.weight.clone()
    assert parameter is model.teacher.weight
    assert len(taken) == 1
    copies.put_back(taken)
    assert torch.equal(model.teacher.weight, before.view(3, 100))
    assert not torch.equal(model.teacher.weight, later)
    assert all(watched._value is None for watched in copies._watched if not watched.follows)


@pytest.mark.parametrize("copied", [2**30, 0])
def test_in_the_first_window(copied: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen, "_COPIED_BYTES", copied)
    model = Model()
    copies, before = model.copies(), model.teacher.weight.clone()
    taken = window(model, copies)
    model.follow()
    if copied:
        copies.put_back(taken)
        assert torch.equal(model.teacher.weight, before)
    else:
        with pytest.raises(RecoveryError, match=r"shape \(3, 100\) that no optimizer trains"):
            copies.put_back(taken)


@pytest.mark.parametrize("counted", [False, True])
def test_one_that_begins_late(counted: bool) -> None:
    """By a way that torch counts, in the next window; by another one, as soon as one of its parameters is looked at."""
    model = Model()
    copies = model.copies()
    taken = []
    for _ in range(10):
        taken = window(model, copies)
    assert taken == []
    for _ in range(6):
        with torch.no_grad():
            model.teacher.weight.mul_(0.5) if counted else model.follow()
        taken = window(model, copies)
        if counted:
            break
    assert [parameter.shape for parameter, _ in taken] == [(3, 100)]


def test_other_layouts_and_unfreezing() -> None:
    model, head, teacher = nn.Module(), nn.Linear(2, 2), nn.Conv2d(3, 4, 3)
    teacher.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.head, model.teacher = head, teacher
    model.empty = nn.Parameter(torch.zeros(0), requires_grad=False)
    trained = list(head.parameters())
    copies = FrozenCopies(lambda: trained)
    taken = copies.take(list(model.parameters()), window=True)
    before = teacher.weight.clone()
    teacher.weight.data = torch.ones(4, 3, 3, 3)
    copies.put_back(taken)
    assert torch.equal(teacher.weight, before)
    trained += [*teacher.parameters()]
    assert [len(value) for _, value in copies.take(list(model.parameters()), window=True)] == [0]


class Packed(nn.Parameter):
    """A quantized weight, as libraries for such have them."""

    def reshape(self, *shape: Any) -> torch.Tensor:
        raise NotImplementedError


def test_parameters_of_other_classes_are_left_alone() -> None:
    model = nn.Module()
    model.packed, model.nowhere = Packed(torch.ones(3)), nn.Parameter(torch.ones(3, device="meta"))
    copies = FrozenCopies(list)
    for _ in range(5):
        assert copies.take(list(model.parameters()), window=True) == []
