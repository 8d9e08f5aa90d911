"""Global variables of the user's modules, and attributes of classes and functions: which are found, and put back."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from lightning_replica.core.inexact import Inexact
from lightning_replica.core.user_code import UserCode
from lightning_replica.state.code_variables import variables_of
from lightning_replica.state.objects.capture import Anchors, Recorder, Root
from tests.chaos import zoo

ANCHORS = Anchors({})
COUNT = 0
LATER: Any  # there is none before the first step
SEEN: list[int] = []
WEIGHT = torch.zeros(2)
UNUSED = 0


def steps_of(function: Callable[..., int]) -> Callable[..., int]:
    steps = 0

    @functools.wraps(function)
    def counted(*arguments: Any) -> int:
        nonlocal steps
        steps += 1
        return function(*arguments) + steps

    return counted


def add(item: int, to: list[int] = []) -> int:  # noqa: B006
    to.append(item)
    return len(to)


@steps_of
def helps(number: int) -> int:
    global COUNT, LATER
    COUNT, LATER = COUNT + 1, number
    WEIGHT.data += 1
    return COUNT + int(WEIGHT.sum())


class Named:
    made = 0
    names: list[str] = []

    @classmethod
    def make(cls) -> int:
        cls.made += 1
        cls.names.append("x")
        cls.last = cls.made  # type: ignore[attr-defined]
        return cls.made + len(cls.names)

    @staticmethod
    def of_another() -> int:
        zoo.STEPS += 1
        return zoo.STEPS


class Derived(Named):
    @property
    def number(self) -> int:
        SEEN.append(1)
        return len(SEEN)

    def step(self) -> list[int]:
        return [self.number, self.make(), self.of_another(), add(1), helps(2), sum(add(n) for n in SEEN)]


def recorder() -> tuple[Recorder, Inexact]:
    inexact = Inexact()
    return Recorder(inexact.report), inexact


def test_all_of_it_goes_back_any_number_of_times() -> None:
    records, inexact = recorder()
    roots = [*variables_of(UserCode([], [Derived]))]
    taken = records.take(roots, ANCHORS)
    first = Derived().step()
    assert "LATER" in globals()
    for _ in range(3):
        taken.put_back(inexact.report)
        assert "LATER" not in globals()
        assert "last" not in vars(Derived)
        records.forget()
        assert Derived().step() == first
    taken.put_back(inexact.report)
    assert not inexact.known


def test_what_changes_is_seen() -> None:
    records, _ = recorder()
    roots = [*variables_of(UserCode([], [Derived]))]
    before = records.take(roots, ANCHORS)
    assert records.take(roots, ANCHORS) is before
    Derived().step()
    assert records.take(roots, ANCHORS) is not before
    before.put_back(lambda *_: None)


def test_only_what_code_of_the_users_names_counts() -> None:
    roots = {root.name: root for root in variables_of(UserCode([], [Derived, nn.Linear]))}
    mine = roots[f"globals of {__name__}"]
    assert mine.only is not None
    assert {"COUNT", "LATER", "SEEN", "WEIGHT"} <= set(mine.only)
    assert not {"UNUSED", "pytest", "torch", "Derived", "zoo"} & set(mine.only)
    assert "STEPS" in (roots["globals of tests.chaos.zoo"].only or ())
    assert not [name for name in roots if "torch" in name]
    assert f"class {__name__}.Named" in roots


def test_the_module_of_an_installed_class_counts_if_that_is_wanted() -> None:
    assert [*variables_of(UserCode([], [nn.LSTM]))] == []
    names = [root.name for root in variables_of(UserCode([MeanMetric()]))]
    assert "class torchmetrics.aggregation.MeanMetric" in names


@pytest.mark.parametrize("base", [int, float, str, bytes, complex])
def test_numbers_and_texts_with_attributes(base: Any) -> None:
    cls = type("Own", (base,), {})
    value = cls(b"1") if base is bytes else cls(1)
    value.note = [1]
    records, inexact = recorder()
    holder = type("Holder", (), {})()
    holder.value = value
    taken = records.take([Root(holder, "it")], ANCHORS)
    value.note.append(2)
    value.more = 1
    taken.put_back(inexact.report)
    assert (holder.value, holder.value.note, hasattr(value, "more")) == (value, [1], False)
