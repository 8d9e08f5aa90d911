"""Random objects of all kinds, changed at random: put back they are what they were, and sent they are what they are."""

import array
import collections
import io
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningModule

from lightning_replica.state.objects.signature import differences, signature_of
from tests.state.test_reachable import Copies, put_sent

LEAVES = 13
ATOMS = (int, float, complex, str, bytes, type(None))


class Own:
    """An object of the user's class."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b


class OwnList(list[Any]):
    """A list with attributes."""


class OwnNumber(int):
    """A number with attributes."""

    def __init__(self, number: int) -> None:
        self.seen = [number]


class OwnTensor(torch.Tensor):
    """A tensor with attributes."""

    labels: list[int]


def labelled(tensor: torch.Tensor, labels: list[int]) -> torch.Tensor:
    made = tensor.as_subclass(OwnTensor)
    made.labels = labels
    return made


class Builder:
    """Builds the same objects from the same seed, with objects that several others refer to."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.made: list[Any] = []

    def value(self, depth: int = 0) -> Any:
        if self.made and self.dice.random() < 0.2:
            return self.dice.choice(self.made)
        kind = self.dice.randrange(LEAVES if depth > 3 else LEAVES + 9)
        made = self.leaf(kind) if kind < LEAVES else self.container(kind - LEAVES, depth + 1)
        if kind > 1:
            self.made.append(made)
        return made

    def leaf(self, kind: int) -> Any:
        number = self.dice.randrange(100)
        makers = (
            lambda: number,
            lambda: self.dice.choice([None, True, "text", 0.5, b"bytes", 1j]),
            lambda: torch.full((3,), float(number)),
            lambda: np.arange(4) + number,
            lambda: bytearray([number]),
            lambda: array.array("i", [number]),
            lambda: io.BytesIO(bytes([number])),
            lambda: random.Random(number),
            lambda: iter(list(range(number, number + 50))),
            lambda: OwnNumber(number),
            lambda: torch.full((3,), float(number), requires_grad=True),
            lambda: torch.full((3,), float(number), requires_grad=True) * 2,
            lambda: labelled(torch.full((3,), float(number), requires_grad=True) * 2, [number]),
        )
        return makers[kind]()

    def container(self, kind: int, depth: int) -> Any:
        items = [self.value(depth) for _ in range(self.dice.randrange(4))]
        makers = (
            lambda: items,
            lambda: dict(enumerate(items)),
            lambda: tuple(items),
            lambda: collections.deque(items),
            lambda: Own(**{f"x{n}": item for n, item in enumerate(items)}),
            lambda: Slotted(items, len(items)),
            lambda: OwnList(items),
            lambda: collections.OrderedDict((str(n), item) for n, item in enumerate(items)),
            lambda: {self.dice.randrange(50) for _ in range(3)},
        )
        return makers[kind]()


def change(value: Any, dice: random.Random, builder: Builder, met: set[int]) -> None:
    """Change an object and what it leads to, here and there, in place."""
    if isinstance(value, tuple):  # which of those that are equal are the same object is not kept
        for item in value:
            change(item, dice, builder, met)
        return
    if isinstance(value, OwnNumber) and id(value) not in met:
        met.add(id(value))
        change(value.seen, dice, builder, met)
    if id(value) in met or isinstance(value, ATOMS):
        return
    met.add(id(value))
    acts = dice.random() < 0.5
    if isinstance(value, torch.Tensor) and value.requires_grad and acts and not value.is_inference():
        with torch.inference_mode(False), torch.enable_grad():  # it may be a hook of a validation
            value.sum().backward(retain_graph=True)
    elif isinstance(value, torch.Tensor):
        value.data.add_(acts)
    elif isinstance(value, np.ndarray):
        value += acts
    elif isinstance(value, (bytearray, array.array)) and acts:
        value.append(dice.randrange(100))
    elif isinstance(value, io.BytesIO) and acts:
        value.write(b"more")
    elif isinstance(value, random.Random) and acts:
        value.random()
    elif isinstance(value, type(iter([]))) and acts:
        next(value, None)
    elif isinstance(value, set) and acts:
        value.symmetric_difference_update({1, dice.randrange(50)})
    elif isinstance(value, dict):
        for item in list(value.values()):
            change(item, dice, builder, met)
        if acts:
            value.update({"new": builder.value(2)})
        elif value:
            del value[next(iter(value))]
    elif isinstance(value, (list, collections.deque)):
        for item in list(value):
            change(item, dice, builder, met)
        if acts:
            value.append(builder.value(2))
        elif value:
            value.pop()
        if isinstance(value, OwnList):
            value.tag = dice.randrange(5)  # type: ignore[attr-defined]
    elif isinstance(value, (Own, SimpleNamespace)):
        change(vars(value), dice, builder, met)
    elif isinstance(value, Slotted):
        change(value.a, dice, builder, met)
        value.b = builder.value(2)


def module_of(seed: int) -> Any:
    module: Any = LightningModule()
    builder = Builder(seed)
    for number in range(3):
        setattr(module, f"value{number}", builder.value())
    return module


def changed(module: Any, seed: int) -> None:
    dice, builder = random.Random(seed), Builder(seed + 1)
    for number in range(3):
        change(getattr(module, f"value{number}"), dice, builder, set())
        if dice.random() < 0.3:
            setattr(module, f"value{number}", builder.value(2))


def signature(copies: Copies) -> dict[str, str]:
    taken = Copies(copies.module).take()
    return signature_of(taken.capture, taken.anchors, contents=True)


def surprising(copies: Copies) -> set[str]:
    """What is told, without sets of numbers that had to be filled again: their order may be another one."""
    return {name for name, each in copies.inexact.known.items() if "another order" not in each.why}


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 10**6), min_size=1, max_size=3), st.integers(0, 10**6))
def test_put_back_and_sent(seed: int, before: list[int], after: int) -> None:
    module = module_of(seed)
    copies = Copies(module)
    for each in before:
        changed(module, each)
        taken = copies.take()
    was = signature(copies)
    sent = copies.whole(taken)
    for _ in range(2):
        changed(module, after)
        copies.take()
        copies.put(taken)
        assert differences(was, signature(copies)) == []
    fresh = module_of(seed)
    found = put_sent(fresh, sent)
    lead_to_themselves = {name for name, each in found.inexact.known.items() if "leads to itself" in each.why}
    assert differences(was, signature(found)) == [] or lead_to_themselves
    assert surprising(copies) == surprising(found) - lead_to_themselves == set()
