"""What functions have cached goes back, and to a replacement; what cannot is named."""

import functools
import os
import random
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch

from lightning_replica.state.objects.caches import Cache, Call
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
    assert [each[1] for each in cache.results().values()] == [call.keywords for call in CALLS]
    assert list(map(cache.call_of, cache.results())) == CALLS
    assert all(cache.results()[cache.key_of(call)] is each for call, each in zip(CALLS, made, strict=True))


@pytest.mark.parametrize("limit", LIMITS)
def test_it_works_on_after_it_was_put_back(limit: int | None) -> None:
    function = cached(limit)
    first = function(1)
    then = Cache(function).results()
    for number in range(2, 8):
        function(number)
    assert Cache(function).put_back(then) == []
    assert function.cache_info().currsize == 1
    assert function(1) is first
    for number in range(40):
        assert function(number)[0] == (number,)
    assert function.cache_info().currsize == (40 if limit is None else limit)
    assert function(39) is function(39)


class Module(L.LightningModule):
    """Calls functions that draw, that count in what they have made, and that are methods."""

    def __init__(self, limit: int | None) -> None:
        super().__init__()
        self.dice = random.Random(4)
        self.draw: Any = functools.lru_cache(limit)(self._draw)
        self.generator: Any = functools.lru_cache(limit)(random.Random)
        self.bank: Any = functools.lru_cache(limit)(torch.zeros)
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


def test_a_number_that_a_replacement_draws_otherwise_is_named() -> None:
    module, other = Numbers(4), Numbers(4)
    copies = Copies(module)
    module.number()
    sent = copies.private()
    found = put_sent(other, sent).inexact.known
    assert [(name, each.why) for name, each in found.items()] == [
        ("module.number()", "in this replacement, something else is cached")
    ]


def test_a_cache_without_a_limit_takes_any_number() -> None:
    module, other = Numbers(None), Numbers(None)
    copies = Copies(module)
    module.number()
    assert not put_sent(other, copies.private()).inexact.known
    assert other.number() == module.number()


def test_a_call_that_fails_in_a_replacement_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", "1")
    module = Numbers(4, lambda name: [os.environ[name]])
    copies = Copies(module)
    module.number("HERE")
    sent = copies.private()
    monkeypatch.delenv("HERE")
    found = put_sent(Numbers(4, lambda name: [os.environ[name]]), sent).inexact.known
    assert found["module.number('HERE')"].why == "it cannot be called again (KeyError: 'HERE')"


def test_what_hooks_have_made_it_forget_is_named() -> None:
    module = Numbers(4)
    module.number()
    copies = Copies(module)
    taken = copies.take()
    module.number.cache_clear()
    copies.put(taken)
    assert copies.inexact.known["module.number"].why == (
        "it could not be put back (ValueError: 1 of the calls that it had cached are forgotten, as ())"
    )


def test_what_a_full_cache_forgets_by_itself_is_no_state() -> None:
    module = Numbers(2, torch.zeros)
    module.number(1)
    module.number(2)
    copies = Copies(module)
    taken = copies.take()
    module.number(3)
    copies.put(taken)
    assert not copies.inexact.known
