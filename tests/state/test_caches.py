"""What functions have cached goes back, and to a replacement; what cannot is named."""

import fnmatch
import functools
import random
import threading
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch

from lightning_replica.state.objects.caches import Cache, Call, _returning, entries_of
from tests.state.test_reachable import Copies, put_sent

CALLS = [
    *(Call((1,)), Call(("x",)), Call((2.0,), {"y": 3}), Call(((1, 2),)), Call(()), Call((1, "x"), {"a": 1, "b": "2"})),
    *(Call((), {"z": None}), Call((None, 3))),
]
LIMITS = [None, 16]


def cached(limit: int | None, typed: bool = False) -> Any:
    @functools.lru_cache(maxsize=limit, typed=typed)
    def made(*arguments: Any, **keywords: Any) -> list[Any]:
        return [arguments, keywords]

    return made


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("limit", LIMITS)
def test_each_call_is_found_by_its_key(limit: int | None, typed: bool) -> None:
    """Of each version of Python: another way to keep them would be another key."""
    function = cached(limit, typed)
    made = [function(*call.arguments, **call.keywords) for call in CALLS]
    cache = Cache(function)
    assert [each for _, each in cache.entries()] == made
    assert [cache.call_of(key) for key, _ in cache.entries()] == CALLS
    assert [cache.key_of(call) for call in CALLS] == [key for key, _ in cache.entries()]


@pytest.mark.parametrize("limit", [None, 16, 3, 1])
def test_it_works_on_after_it_was_put_back(limit: int | None) -> None:
    """As one that was left alone: also with what it forgets."""
    function, alone = cached(limit), cached(limit)
    for each in (function, alone):
        for number in (1, 2, 3, 1):
            each(number)
    held = [function(number) for number in ((1,) if limit == 1 else (1, 3))]
    then = Cache(function).entries()
    for number in range(2, 40):
        function(number)
    Cache(function).put_back(then)
    assert [function(number) for number in ((1,) if limit == 1 else (1, 3))] == held
    assert Cache(function).entries()[-1][1] is held[-1]
    for each in (function, alone):
        for number in (1,) if limit == 1 else (1, 3):
            each(number)
        for number in (5, 6, 2, 7):
            each(number)
    assert [result for _, result in Cache(function).entries()] == [result for _, result in Cache(alone).entries()]


def test_another_thread_gets_its_own_result_meanwhile() -> None:
    made, found = threading.Event(), list[Any]()

    @functools.lru_cache(maxsize=4)
    def function(number: int, *, times: int = 2) -> int:
        return number * times

    def answer() -> None:
        found.append(function(5))
        made.set()

    wrapped: Any = function.__wrapped__
    with _returning(wrapped, "something else"):
        threading.Thread(target=answer).start()
        made.wait()
        assert function(1) == "something else"  # type: ignore[comparison-overlap]
    assert found == [10]
    assert function(2) == 4


class Module(L.LightningModule):
    """Calls functions that draw, that count in what they have made, and that are methods."""

    def __init__(self, limit: int | None) -> None:
        super().__init__()
        self.dice = random.Random(4)
        self.draw: Any = functools.lru_cache(limit)(self._draw)
        self.generator: Any = functools.lru_cache(limit)(lambda seed: random.Random(seed))
        self.bank: Any = functools.lru_cache(limit)(lambda size: torch.zeros(size))
        self.generator(3)
        self.draw(0)

    def _draw(self, turn: int) -> torch.Tensor:
        return torch.tensor([self.dice.random()])

    def advance(self, turn: int) -> list[float]:
        self.bank(2).add_(1)
        return [float(self.draw(turn)), self.generator(3).random(), float(self.bank(2).sum())]


@pytest.mark.parametrize("limit", LIMITS)
def test_a_batch_that_is_done_again(limit: int | None) -> None:
    module = Module(limit)
    copies = Copies(module)
    module.advance(1)
    taken = copies.take()
    expected = [module.advance(turn) for turn in (1, 2, 0)]
    copies.put(taken)
    assert [module.advance(turn) for turn in (1, 2, 0)] == expected
    assert not copies.inexact.known


@pytest.mark.parametrize("limit", LIMITS)
def test_a_replacement(limit: int | None) -> None:
    module, other = Module(limit), Module(limit)
    copies = Copies(module)
    for turn in (1, 2):
        module.advance(turn)
    replaced = put_sent(other, copies.private())
    assert other.generator is not module.generator
    assert [other.advance(turn) for turn in (1, 5, 2)] == [module.advance(turn) for turn in (1, 5, 2)]
    assert not replaced.inexact.known


class Numbers(L.LightningModule):
    def __init__(self, limit: int | None, function: Callable[..., Any] = random.random) -> None:
        super().__init__()
        self.number: Any = functools.lru_cache(limit)(function)


def test_a_cache_without_a_limit_takes_any_number() -> None:
    module, other = Numbers(None), Numbers(None)
    copies = Copies(module)
    module.number()
    assert not put_sent(other, copies.private()).inexact.known
    assert other.number() == module.number()


def test_a_number_of_a_function_in_c_cannot_be_cached_in_a_replacement() -> None:
    module, other = Numbers(4), Numbers(4)
    copies = Copies(module)
    module.number()
    found = put_sent(other, copies.private()).inexact.known
    assert "what it has forgotten cannot be cached again" in found["module.number"].why


def test_what_the_user_has_given_the_function() -> None:
    module, other = Module(4), Module(4)
    module.draw.calls = [1]
    copies = Copies(module)
    taken = copies.take()
    module.draw.calls.append(2)
    module.draw.more = 3
    sent = copies.private()
    copies.put(taken)
    assert module.draw.calls == [1]
    assert not hasattr(module.draw, "more")
    assert not put_sent(other, sent).inexact.known
    assert (other.draw.calls, other.draw.more) == ([1, 2], 3)
    assert other.draw.cache_parameters()["maxsize"] == 4


class Refuses:
    """A key whose class refuses what it can."""

    def __init__(self, number: int) -> None:
        self.number, self.asked = number, 0

    def __repr__(self) -> str:
        raise RuntimeError("no text")


def test_a_key_that_cannot_be_shown() -> None:
    module = Numbers(4, lambda key: [key.number])
    key = Refuses(1)
    module.number(key)
    copies = Copies(module)
    taken = copies.take()
    module.number(Refuses(2))
    copies.take()
    copies.put(taken)
    assert [result for _, result in Cache(module.number).entries()] == [[1]]


def test_a_cache_in_a_cache() -> None:
    module = Numbers(None, functools.lru_cache(maxsize=8)(lambda number: [number]))
    copies = Copies(module)
    first = module.number(1)
    taken = copies.take()
    module.number(2).append(3)
    copies.put(taken)
    assert (module.number(1), module.number(2)) == (first, [2])
    assert not copies.inexact.known


def test_a_class_of_torch_that_the_user_caches() -> None:
    module = Numbers(None, torch.Generator)
    module.number()
    copies = Copies(module)
    taken = copies.take()
    drawn = float(torch.rand(1, generator=module.number()))
    copies.put(taken)
    assert float(torch.rand(1, generator=module.number())) == drawn


def test_what_a_library_caches_is_no_state() -> None:
    """Decorators and types of Python lead to it, and its keys may be of classes that another process does not know."""
    function: Any = fnmatch._compile_pattern  # type: ignore[attr-defined]
    fnmatch.fnmatchcase("a", "b")
    assert Cache(function).entries()
    assert entries_of(function) == []
