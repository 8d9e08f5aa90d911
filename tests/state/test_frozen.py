"""Which parameters that nobody trains are copied, and how they go back."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_replica.core.inexact import Scope
from lightning_replica.errors import RecoveryError
from lightning_replica.state.frozen import FrozenCopies, FrozenValues
from lightning_replica.state.objects.contents import Contents


class Bare(nn.Module):
    bank: Any
    head: Any
    teacher: Any
    packed: Any


class Model(nn.Module):
    """A large backbone that nobody writes to, a small head that is trained, and a teacher that follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.ModuleList(nn.Linear(100, 100) for _ in range(10))
        self.head, self.teacher = nn.Linear(100, 3), nn.Linear(100, 3)

    def follow(self) -> None:
        self.teacher.weight.data.mul_(0.9)

    def copies(self) -> FrozenCopies:
        return FrozenCopies(lambda: list(self.head.parameters()), never)


def never(name: str, why: str, scope: Scope = "fault") -> None:
    pytest.fail(f"{name}: {why}")


def window(model: nn.Module, copies: FrozenCopies) -> FrozenValues:
    return copies.take(dict(model.named_parameters()), window=True)


def test_only_what_changes_is_copied_again() -> None:
    model = Model()
    copies = model.copies()
    before = dict[str, Any]()
    for _ in range(6):
        taken = {held.name: copy for held, copy in window(model, copies)}
        changed = [name for name, copy in taken.items() if before and copy is not before[name]]
        assert changed == (["module.teacher.weight"] if before else [])
        before = taken
        model.follow()
    last, later = window(model, copies), model.teacher.weight.clone()
    model.follow()
    copies.put_back(last)
    assert torch.equal(model.teacher.weight, later)


@pytest.mark.parametrize("way", ["counted", "data"])
@pytest.mark.parametrize("windows", [1, 10])
def test_a_large_one_whose_first_write_is_in_the_step_that_is_repeated(windows: int, way: str) -> None:
    model = Bare()
    model.bank = nn.Parameter(torch.zeros(100_000), requires_grad=False)
    for copied in (False, True):
        copies = FrozenCopies(list, never)
        copies._contents = Contents(never, copied_bytes=2**28 if copied else 0)
        for _ in range(windows):
            taken = window(model, copies)
        model.bank.data[:] += 1 if way == "data" else 0
        if way == "counted":
            model.bank.detach().add_(1)
        if copied:
            copies.put_back(taken)
            assert float(model.bank.max()) == 1  # as the first round has left it
        else:
            with pytest.raises(RecoveryError, match="module.bank, one of 1 parameters of which that is so, is trained"):
                copies.put_back(taken)


def test_rows_that_are_written_through_data_go_back() -> None:
    """As of a memory bank."""
    model = Bare()
    model.bank = nn.Parameter(torch.zeros(3000, 64), requires_grad=False)
    copies = FrozenCopies(list, never)
    for step in range(8):
        taken = window(model, copies)
        model.bank.data[100 * step : 100 * step + 7] += 1
        model.bank.data[100 * step : 100 * step + 7] += 1
        copies.put_back(taken)
        assert float(model.bank.sum()) == 64 * 7 * step
        model.bank.data[100 * step : 100 * step + 7] += 1


def test_other_layouts_and_unfreezing() -> None:
    model = Bare()
    model.head, model.teacher = nn.Linear(2, 2), nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.empty = nn.Parameter(torch.zeros(0), requires_grad=False)
    trained = list(model.head.parameters())
    copies = FrozenCopies(lambda: trained, never)
    taken = window(model, copies)
    before = model.teacher.weight.clone()
    model.teacher.weight.data = torch.ones(4, 3, 3, 3)
    copies.put_back(taken)
    assert torch.equal(model.teacher.weight, before)
    trained += [*model.teacher.parameters()]
    assert [held.name for held, _ in window(model, copies)] == ["module.empty"]


class Packed(nn.Parameter):
    """A quantized weight, as libraries for such have them: its methods mean something else."""

    def reshape(self, *shape: int) -> torch.Tensor:  # type: ignore[override]
        raise NotImplementedError

    def clone(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError


def test_parameters_of_other_classes_go_back_by_their_bits() -> None:
    model = Bare()
    model.packed, model.nowhere = Packed(torch.ones(3)), nn.Parameter(torch.ones(3, device="meta"))
    copies = FrozenCopies(list, never)
    for _ in range(5):
        taken = window(model, copies)
        assert [held.name for held, _ in taken] == ["module.packed"]
    model.packed.data.zero_()
    copies.put_back(taken)
    assert model.packed.tolist() == [1, 1, 1]
