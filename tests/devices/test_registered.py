"""Errors whose meaning the user tells. A training with one is in tests/faults/test_npu.py."""

from collections.abc import Iterator

import pytest

from lightning_replica import ConfigurationError, register_fault
from lightning_replica.devices import registered
from lightning_replica.devices.cpu import Cpu
from lightning_replica.devices.interface import DeviceFault
from lightning_replica.devices.registered import fault_of


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    registered._registered.clear()


def test_the_users_word_comes_first() -> None:
    gone = RuntimeError("gloo: Connection closed by peer\nmore")
    known = fault_of(gone, Cpu())
    assert known is not None
    assert known.level == "outside"
    register_fault("Connection .* peer", "lost")
    register_fault("Connection", "retry")
    assert fault_of(gone, Cpu()) == DeviceFault("lost", "gloo: Connection closed by peer")
    assert fault_of(ValueError("x"), Cpu()) is None


def test_any_class_and_whatever_it_came_from() -> None:
    register_fault("PRECISION ERROR", "retry")
    error = KeyError("y")
    error.__cause__ = ArithmeticError("PRECISION ERROR: loss is 1e30")
    fault = fault_of(error, Cpu())
    assert fault is not None
    assert fault.level == "retry"


@pytest.mark.parametrize(
    ("pattern", "level", "complaint"),
    [
        ("x", "again", "level='again' is not known. Use one of outside, retry"),
        ("(", "retry", "is not a regular expression"),
    ],
)
def test_what_makes_no_sense(pattern: str, level: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        register_fault(pattern, level)  # type: ignore[arg-type]
    assert not registered._registered
