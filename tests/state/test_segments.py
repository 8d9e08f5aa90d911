"""Lists and dicts that grow: what is sent in segments is what is there, whatever has been done to it."""

import random
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningModule

from lightning_replica.state.objects import segments
from lightning_replica.state.objects.signature import differences, signature_of
from tests.state.test_reachable import Copies, put_sent

LENGTH = 4  # of a segment, here


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_ITEMS", LENGTH)
    monkeypatch.setattr(segments, "_NEAR", 4 * LENGTH)


def module_of() -> Any:
    module: Any = LightningModule()
    module.rows, module.table, module.recent, module.last = [], OrderedDict(), deque(maxlen=3 * LENGTH), None
    module.others, module.begun, module.count = [], [torch.zeros(2)], [7]
    return module


def signature(module: LightningModule) -> dict[str, str]:
    taken = Copies(module).take()
    return signature_of(taken.capture, taken.anchors, contents=True)


def received(copies: Copies) -> Any:
    """A replacement's module with what the module's rank has mirrored; the same, and nothing is told."""
    found = module_of()
    there = put_sent(found, copies.private())
    assert differences(signature(copies.module), signature(found)) == []
    assert copies.inexact.known == there.inexact.known == {}
    return found


def in_segments(copies: Copies) -> int:
    """How many objects stand in segments of what was sent last."""
    return len(copies.reachable._tracked._segments.numbers)


ROWS: dict[str, Callable[[int], Any]] = {
    "tensors": lambda n: torch.tensor([float(n), 1.0]),
    "numbers": lambda n: torch.tensor(n),
    "floats": lambda n: n / 3,
    "not numbers": lambda n: float("nan"),
    "texts": lambda n: f"\u00e4{n}",
    "dicts": lambda n: {"loss": torch.tensor(n / 3), "n": n, "text": str(n), "!": None},
    "tuples": lambda n: (torch.tensor(n), [torch.ones(2, 1) * n, np.arange(3) + n], (n, "a")),
    "arrays": lambda n: np.array([[n]], dtype=np.int16),
    "arrays without axes": lambda n: np.array(n / 3),
    "numbers of NumPy": lambda n: np.float32(n / 3),
    "complex": lambda n: torch.tensor(1j * n),
    "bits": lambda n: torch.tensor(n % 2 == 0),
    "16 bits": lambda n: torch.tensor(n / 3, dtype=torch.bfloat16),
    "8 bits": lambda n: torch.tensor([n / 3], dtype=torch.float8_e4m3fn),
}


@pytest.mark.parametrize("make", ROWS.values(), ids=ROWS)
def test_rows_of_a_kind(make: Callable[[int], Any]) -> None:
    module = module_of()
    copies = Copies(module)
    copies.take()
    for n in range(5 * LENGTH):
        module.rows.append(make(n))
        module.table[n] = make(n)
        module.recent.append(make(n))
        received(copies)


@pytest.mark.parametrize("kind", ["tensors", "dicts", "tuples", "arrays"])
def test_they_are_encoded_once(kind: str) -> None:
    module = module_of()
    copies = Copies(module)
    copies.take()
    for n in range(10 * LENGTH):
        module.rows.append(ROWS[kind](n))
        received(copies)
    first = copies.private()[0]
    module.rows.append(ROWS[kind](0))
    again = copies.private()[0]
    assert all(a is b for a, b in zip(first[1], again[1], strict=False))
    objects = {"tensors": 1, "dicts": 2, "tuples": 6, "arrays": 1}[kind]
    assert in_segments(copies) == 9 * LENGTH * objects


def test_more_than_a_container_may_have_one_by_one() -> None:
    module = module_of()
    copies = Copies(module)
    copies.take()
    module.rows = [{"loss": torch.tensor(n)} for n in range(1500)]
    module.table = {n: torch.tensor(n) for n in range(1500)}
    assert len(received(copies).rows) == 1500


def test_what_is_written_to_is_encoded_anew() -> None:
    module = module_of()
    copies = Copies(module)
    copies.take()
    module.rows += [{"a": torch.tensor(n), "b": [n]} for n in range(4 * LENGTH)]
    received(copies)
    module.rows[1]["a"].data.fill_(7)
    assert received(copies).rows[1]["a"] == 7
    module.rows[1]["b"].append(8)
    assert received(copies).rows[1]["b"] == [1, 8]
    module.rows[2] = {"a": torch.tensor(0), "b": [0]}
    received(copies)
    module.rows[3]["a"].seen = True
    assert received(copies).rows[3]["a"].seen
    module.rows[4]["a"] = module.rows[4]["a"].float().requires_grad_()
    assert received(copies).rows[4]["a"].requires_grad


def test_what_stands_in_a_segment_and_elsewhere_is_one_object() -> None:
    module = module_of()
    copies = Copies(module)
    copies.take()
    module.rows += [[torch.tensor(n)] for n in range(4 * LENGTH)]
    received(copies)
    module.last, module.others = module.rows[1], [module.rows[2][0], module.rows[2][0]]
    found = received(copies)
    assert found.last is found.rows[1]
    assert found.others[0] is found.others[1] is found.rows[2][0]
    del module.rows[:]
    found = received(copies)
    assert found.last[0] == 1


def test_what_shares_the_memory_of_what_stands_in_a_segment() -> None:
    module = module_of()
    copies = Copies(module)
    copies.take()
    module.rows += [torch.tensor([float(n), 0.0]) for n in range(6 * LENGTH)]
    received(copies)
    before = in_segments(copies)
    module.last = module.rows[5][:1]
    module.others = [module.rows[9].numpy()]
    found = received(copies)
    found.rows[5].fill_(9)
    found.rows[9].fill_(8)
    assert found.last == 9
    assert found.others[0].tolist() == [8, 8]
    assert in_segments(copies) == before - 2 * LENGTH
    module.last, module.others = None, []
    received(copies)


def test_a_view_of_what_was_there_in_the_beginning() -> None:
    module = module_of()
    copies = Copies(module)
    copies.take()
    module.rows += [torch.zeros(2) for _ in range(3 * LENGTH)]
    module.rows[2] = module.begun[0].view(2)
    found = received(copies)
    found.begun[0].fill_(3)
    assert found.rows[2].tolist() == [3, 3]


def test_an_object_that_stands_in_several_places() -> None:
    module = module_of()
    copies = Copies(module)
    copies.take()
    one = {"n": 1}
    module.rows += [one, *({"n": n} for n in range(3 * LENGTH))]
    module.others = [{"n": 0}, one, *({"n": n} for n in range(3 * LENGTH))]
    module.table = {n: one if n < 2 else {"n": n} for n in range(3 * LENGTH)}
    found = received(copies)
    assert found.rows[0] is found.others[1] is found.table[0] is found.table[1]
    module.last = [0]
    module.recent += [module.last, *([n] for n in range(8)), module.last, [1], [2]]
    found = received(copies)
    assert found.last is found.recent[0] is found.recent[9]
    module.rows = [module.count, *([n] for n in range(3 * LENGTH))]
    found = received(copies)
    assert found.rows[0] is found.count


def test_a_cache_that_is_filled_and_emptied() -> None:
    module = module_of()
    copies = Copies(module)
    copies.take()
    for epoch in range(3):
        for n in range(6 * LENGTH):
            module.table[n] = (torch.tensor(n + epoch), n)
            module.table.pop(n - 20, None)
            received(copies)
        module.table.clear()
        received(copies)
        assert in_segments(copies) == 0


def test_a_key_that_is_a_tensor() -> None:
    module = module_of()
    copies = Copies(module)
    copies.take()
    module.others = [(torch.tensor(n),) for n in range(3 * LENGTH)]
    module.table = {each: n for n, each in enumerate(module.others)}
    found = received(copies)
    assert [*found.table] == found.others


def row(dice: random.Random, module: Any) -> Any:
    known = [*module.rows, *module.recent, *module.table.values(), module.last, *module.begun]
    tensors = [each for each in known if isinstance(each, torch.Tensor)]
    kind = dice.randrange(12)
    if kind < 5:
        return torch.tensor([dice.random()])
    if kind < 7:
        return {"loss": torch.tensor(dice.random()), "n": dice.randrange(9)}
    if kind < 8:
        return dice.choice(known)
    if kind < 9 and tensors:
        return dice.choice(tensors).view(-1)
    if kind < 10 and tensors:
        return dice.choice(tensors).numpy()
    return dice.random()


def act(dice: random.Random, module: Any) -> None:
    rows, table, recent = module.rows, module.table, module.recent
    action = dice.randrange(14)
    if action < 4:
        rows += [row(dice, module) for _ in range(dice.randrange(3 * LENGTH))]
    elif action < 6:
        recent.extend(row(dice, module) for _ in range(dice.randrange(LENGTH)))
    elif action < 8:
        for _ in range(dice.randrange(2 * LENGTH)):
            table[dice.randrange(5 * LENGTH)] = row(dice, module)
    elif action < 9:
        module.last = row(dice, module)
    elif action < 10 and rows:
        rows[dice.randrange(len(rows))] = row(dice, module)
    elif action < 11 and rows:
        del rows[: dice.randrange(len(rows))]
    elif action < 12 and table:
        del table[dice.choice([*table])]
    elif action < 13:
        for each in (*rows, *recent, *table.values()):
            if isinstance(each, torch.Tensor) and dice.random() < 0.2:
                each.data.add_(1)
            elif isinstance(each, dict) and dice.random() < 0.2:
                each["n"] = dice.randrange(9)
    elif dice.random() < 0.3:
        rows.clear()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9))
def test_whatever_is_done(seed: int) -> None:
    dice, module = random.Random(seed), module_of()
    copies = Copies(module)
    copies.take()
    for _ in range(25):
        act(dice, module)
        received(copies)
