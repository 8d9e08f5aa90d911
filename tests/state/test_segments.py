"""Lists and dicts that grow: what is sent in segments is what is there, whatever has been done to it."""

import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningModule
from torch import nn

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
    "tuples": lambda n: (torch.tensor(n), [torch.ones(2, 1) * n], (n, "a")),
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


@pytest.mark.parametrize("kind", ["tensors", "dicts", "tuples"])
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
    objects = {"tensors": 1, "dicts": 2, "tuples": 5}[kind]
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


class Part(nn.Module):
    rows: Any
    recent: Any
    last: Any


def module_with_parts() -> Any:
    module = module_of()
    for name in ("first", "second"):
        part = Part()
        part.rows, part.recent, part.last = [], deque(maxlen=3 * LENGTH), None
        setattr(module, name, part)
    return module


def attributes(module: Any) -> list[Any]:
    parts = [each for part in (module.first, module.second) for each in (part.rows, part.recent, part.last)]
    return [module.rows, module.table, module.recent, module.last, module.others, module.begun, *parts]


def relations(module: Any) -> list[Any]:
    """What all attributes lead to, in the order in which it is met: contents, who is who, and who shares memory."""
    met: dict[int, int] = {}
    found, extents = list[Any](), list[tuple[int, int]]()

    def visit(value: Any) -> None:
        if type(value) in (int, float, str, bool, type(None)):
            found.append(repr(value))
            return
        if id(value) in met:
            found.append(met[id(value)])
            return
        met[id(value)] = len(met)
        found.append(type(value))
        if isinstance(value, torch.Tensor):
            found.append((value.dtype, value.shape, value.stride(), value.requires_grad, value.tolist()))
            extents.append((value.data_ptr(), value.nbytes))
        elif isinstance(value, np.ndarray):
            found.append((value.dtype, value.shape, value.tolist()))
            extents.append((value.__array_interface__["data"][0], value.nbytes))
        elif isinstance(value, dict):
            for each in (*value.keys(), *value.values()):
                visit(each)
        else:
            for each in value:
                visit(each)

    visit(attributes(module))
    pairs = [(n, m) for n in range(len(extents)) for m in range(n)]
    shared = [(n, m) for n, m in pairs if overlap(extents[n], extents[m])]
    return [found, [(n, m, extents[n][0] - extents[m][0]) for n, m in shared]]


def overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[0] + other[1] and other[0] < one[0] + one[1]


def row(dice: random.Random, module: Any) -> Any:
    known = [each for one in attributes(module) for each in (one.values() if isinstance(one, dict) else one or ())]
    tensors = [each for each in known if isinstance(each, torch.Tensor)]
    kind = dice.randrange(14)
    if kind < 5:
        return torch.tensor([dice.random(), 1.0])
    if kind < 7:
        return {"loss": torch.tensor(dice.random()), "n": dice.randrange(9)}
    if kind < 9 and known:
        return dice.choice(known)
    if kind < 10 and tensors:
        return dice.choice(tensors).detach().view(-1)
    if kind < 11 and tensors:
        return dice.choice(tensors).detach().numpy()
    if kind < 12 and tensors:
        return torch.from_numpy(dice.choice(tensors).detach().reshape(-1).numpy()[-1:])
    return dice.choice([dice.random(), "\ud83d\ude00", 1 << 2000, [dice.random()]])


def act(dice: random.Random, module: Any) -> None:
    part = dice.choice([module, module.first, module.second])
    rows, recent, table = part.rows, part.recent, module.table
    action = dice.randrange(15)
    if action < 4:
        rows += [row(dice, module) for _ in range(dice.randrange(3 * LENGTH))]
    elif action < 6:
        recent.extend(row(dice, module) for _ in range(dice.randrange(LENGTH)))
    elif action < 8:
        for _ in range(dice.randrange(2 * LENGTH)):
            table[dice.randrange(5 * LENGTH)] = row(dice, module)
    elif action < 9:
        part.last = [row(dice, module)]
    elif action < 10 and rows:
        rows[dice.randrange(len(rows))] = row(dice, module)
    elif action < 11 and rows:
        del rows[: dice.randrange(len(rows))]
    elif action < 12 and table:
        del table[dice.choice([*table])]
    elif action < 13:
        for each in (*rows, *recent):
            if isinstance(each, torch.Tensor) and dice.random() < 0.2:
                each.data.add_(1)
            elif isinstance(each, dict) and dice.random() < 0.2:
                each["n"] = dice.randrange(9)
    elif action < 14:
        module.rows, module.first.rows = module.first.rows, module.rows
    elif dice.random() < 0.3:
        rows.clear()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), st.booleans())
@example(344243, False)  # an array that begins in the middle of the memory of an array
def test_whatever_is_done(seed: int, goes_back: bool) -> None:
    dice, module = random.Random(seed), module_with_parts()
    copies = Copies(module)
    before = copies.take()
    for _ in range(25):
        act(dice, module)
        taken = copies.take()
        found = module_with_parts()
        there = put_sent(found, copies.private(taken)).inexact.known.values()
        assert relations(found) == relations(module) or any("not in this replacement" in each.why for each in there)
        if goes_back and dice.random() < 0.2:
            copies.put(before)
        before = taken


def test_a_list_that_is_divided_after_something_in_it_was_sent() -> None:
    """The modules are sent one after the other. Before, what a later one divided was there twice."""
    module = module_with_parts()
    copies = Copies(module)
    copies.take()
    for number in range(12 * LENGTH):
        module.second.recent.append({"loss": torch.tensor(number)})
        if number % 3 == 0:
            module.last = [module.second.recent[len(module.second.recent) // 2]]
        found = module_with_parts()
        put_sent(found, copies.private())
        assert relations(found) == relations(module)


@pytest.mark.parametrize("learns", [True, False])
def test_gradients_of_tensors_in_a_large_container(learns: bool) -> None:
    module = module_of()
    copies = Copies(module)
    module.rows = [torch.tensor([float(n)], requires_grad=learns) for n in range(1200)]
    taken = copies.take()
    module.rows[3].requires_grad_(not learns)
    for _ in range(60):  # it is compared in its turn
        later = copies.take()
    found = module_of()
    put_sent(found, copies.private(later))
    if not learns:  # so many leaves of graphs are left to a peer
        assert found.rows[3].requires_grad
    copies.put(taken)
    assert module.rows[3].requires_grad is learns
    copies.put(later)
    assert module.rows[3].requires_grad is not learns


def test_another_deque_and_another_default() -> None:
    module = module_of()
    module.recent, module.table = deque([1], maxlen=2), defaultdict(int)
    copies = Copies(module)
    taken = copies.take()
    module.recent, module.others = deque([1, 2, 3], maxlen=10), defaultdict(list, {n: [n] for n in range(3 * LENGTH)})
    module.table.default_factory = list
    found = module_of()
    found.recent, found.table = deque([1], maxlen=2), defaultdict(int)
    put_sent(found, copies.private())
    assert found.recent == deque([1, 2, 3])
    assert found.recent.maxlen == 10
    assert found.others.default_factory is found.table.default_factory is list
    copies.put(taken)
    assert module.table.default_factory is int
