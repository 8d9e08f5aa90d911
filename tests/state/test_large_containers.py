"""What large containers hold goes back, and a window looks at what has changed and not at all of it."""

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightning_replica.core.inexact import Scope
from lightning_replica.state.objects.capture import Anchors, Capture, Recorder, Root

SIZE = 3000
WINDOWS = 5  # more than those in which everything is compared


class Recorded:
    """An object with one container, and what is recorded of it."""

    def __init__(self, content: Any) -> None:
        self.told: list[str] = []
        self.holder = SimpleNamespace(content=content)
        self._roots, self._anchors = [Root(self.holder, "it")], Anchors({})
        self.recorder = Recorder(self._report)
        for _ in range(WINDOWS):
            self.take()

    def _report(self, name: str, why: str, scope: Scope = "fault") -> None:
        self.told.append(f"{name}: {why}")

    def take(self, window: bool = True) -> Capture:
        return self.recorder.take(self._roots, self._anchors, window)

    def made(self, window: bool = True) -> int:
        """Takes a capture, and returns how many records were made for it."""
        self.recorder.touched.clear()
        self.take(window)
        return len(self.recorder.touched)


ITEMS: dict[str, Callable[[int], Any]] = {
    "tensors": lambda number: torch.tensor(float(number)),
    "dicts": lambda number: {"loss": torch.tensor(float(number)), "number": number},
    "lists": lambda number: [number],
}


@pytest.mark.parametrize("make", ITEMS.values(), ids=ITEMS)
@pytest.mark.parametrize("kind", [list, deque])
def test_a_growing_list_costs_what_is_new(kind: type, make: Callable[[int], Any]) -> None:
    content = kind(make(number) for number in range(SIZE))
    recorded = Recorded(content)
    for number in range(10):
        before = recorded.take()
        content.append(make(SIZE + number))
        assert recorded.made() <= 4  # the list, the item and what is in that
        assert recorded.made() == 0
    before.put_back(recorded._report)
    assert len(content) == SIZE + 9
    assert recorded.told == []


@pytest.mark.parametrize("window", [True, False])
def test_a_dict_that_is_filled(window: bool) -> None:
    content: dict[int, Any] = {number: ITEMS["dicts"](number) for number in range(SIZE)}
    recorded = Recorded(content)
    before, first = recorded.take(), content[0]
    for number in range(10):
        content[number] = ITEMS["dicts"](-number)
        assert recorded.made(window) <= 4
    before.put_back(recorded._report)
    assert content[0] is first
    assert [item["number"] for item in content.values()] == list(range(SIZE))
    assert recorded.told == []


@pytest.mark.parametrize("window", [True, False])
@pytest.mark.parametrize("place", [0, SIZE // 2, SIZE - 1])
def test_a_write_that_torch_counts_is_seen_at_once(place: int, window: bool) -> None:
    content = [torch.zeros(2) for _ in range(SIZE)]
    recorded = Recorded(content)
    before = recorded.take()
    content[place].add_(1)
    assert recorded.made(window) == 1
    content[place - 1].add_(1)
    assert recorded.made(window) == 1
    before.put_back(recorded._report)
    assert all(each.eq(0).all() for each in content)
    assert recorded.told == []


def test_a_write_that_torch_does_not_count_is_told_when_it_is_found() -> None:
    content = [torch.zeros(2) for _ in range(SIZE)]
    recorded = Recorded(content)
    content.append(torch.zeros(2))
    recorded.take()
    content[SIZE // 2].data.add_(1)
    while not recorded.told:
        recorded.take()
    assert recorded.told[0].startswith("it.content: it has been written to for the first time in one of the last")


@pytest.mark.parametrize("size", [300, 1000])
def test_what_a_container_of_medium_size_holds_is_compared_in_each_window(size: int) -> None:
    content: Any = [np.zeros(2) for _ in range(size - 1)] + [{"seen": 0}]
    recorded = Recorded(content)
    before = recorded.take()
    content[size // 2] += 1
    content[-1]["seen"] += 1
    assert recorded.made() == 1  # the dict; an array's content is no record
    before.put_back(recorded._report)
    assert not any(each.any() for each in content[:-1])
    assert content[-1] == {"seen": 0}
    assert recorded.told == []


def test_a_late_find_is_told_beside_a_write_that_torch_counts() -> None:
    arrays, *lists = [[np.zeros(2) for _ in range(1001)], *([torch.zeros(2) for _ in range(1001)] for _ in range(9))]
    recorded = Recorded([arrays, *lists])
    arrays[-1] += 1
    for tensors in lists:  # one write is counted in each window
        tensors[0].add_(1)
        recorded.take()
    (told,) = recorded.told
    assert told.startswith("it.content[0]: it has been written to for the first time in one of the last")


def test_what_was_put_back_does_not_count_as_written() -> None:
    content = [torch.zeros(2) for _ in range(SIZE)]
    recorded = Recorded(content)
    before = recorded.take()
    content[0].add_(1)
    before.put_back(recorded._report)
    recorded.recorder.forget()
    recorded.take()
    assert recorded.made() == 0
    assert recorded.told == []


def test_a_window_that_slides_keeps_nothing_for_ever() -> None:
    content = deque([torch.zeros(2) for _ in range(SIZE)], maxlen=SIZE)
    recorded = Recorded(content)
    for _ in range(SIZE // 10):
        content.append(torch.zeros(2))
        recorded.take()
    assert len(recorded.take().records) < 1.05 * SIZE
    assert len(recorded.recorder.touched) < 1.05 * SIZE


@pytest.mark.parametrize("make", [str, float, lambda number: ("a", number, None)])
def test_items_that_lead_to_nothing_may_be_many(make: Callable[[int], Any]) -> None:
    content = [make(number) for number in range(300_000)]
    recorded = Recorded(content)
    before = recorded.take()
    last = content.pop()
    recorded.take()
    before.put_back(recorded._report)
    assert content[-1] is last
    assert recorded.told == []


def test_too_many_objects_are_named() -> None:
    recorded = Recorded([[] for _ in range(200_001)])
    assert set(recorded.told) == {"it.content: too many objects are reachable: changes in some are not seen"}


@pytest.mark.parametrize("size", [1, SIZE])
@pytest.mark.parametrize("holds", [list, dict.fromkeys])
def test_attributes_that_tensors_get_later(holds: Callable[[Any], Any], size: int) -> None:
    """Before, a tensor that had none when it was met had none for ever."""
    content = [torch.tensor(float(number)) for number in range(size)]
    recorded = Recorded(holds(content))
    without = recorded.take()
    first: Any = content[0]
    first.seen = [1]
    for _ in range(SIZE):  # it is compared in its turn
        taken = recorded.take()
        if ~id(first) in taken.records:
            break
    first.seen.append(2)
    taken.put_back(recorded._report)
    assert first.seen == [1]
    without.put_back(recorded._report)
    assert not hasattr(first, "seen")
