"""A double whose original has changed is an error."""

import pytest

from lightning_replica import RecoveryCallback
from lightning_replica.devices.cpu import Cpu
from tests.support.doubles import overriding, put


def test_a_double_of_what_is_there() -> None:
    @overriding(new=("count", "_seen"))
    class Counts(RecoveryCallback):
        count = 0
        _seen: list[int]

        def __init__(self) -> None:
            self._seen = []

        def on_recovery_stop(self, trainer: object, pl_module: object, context: object) -> None:
            self.count += 1

    assert Counts.count == 0

    @overriding()
    class CountsMore(Counts):  # with what the first double has brought
        count = 1

    assert CountsMore().count == 1


def test_a_double_of_what_is_there_no_more() -> None:
    with pytest.raises(TypeError, match=r"Names overrides _is_host, name, which Cpu does not have"):

        @overriding(new=("own",))
        class Names(Cpu):
            name = "host"
            is_host = False

            @property
            def _is_host(self) -> bool:
                return self.own()

            def own(self) -> bool:
                return False


def test_what_is_put_in_the_place_of_nothing() -> None:
    class Original:
        value = 1

    put(Original, "value", 2)
    assert Original.value == 2
    with pytest.raises(AttributeError, match="worth"):
        put(Original, "worth", 2)
