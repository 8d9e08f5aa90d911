"""What is not exact: said once, and given to the incidents that it concerns."""

import pytest

from lightning_replica.core.inexact import Inexact


def test_each_finding_is_said_once_and_a_new_reason_is_said_too(caplog: pytest.LogCaptureFixture) -> None:
    inexact = Inexact()
    for _ in range(2):
        inexact.report("module.x", "it is too large", "replacement")
        inexact.report("module.x", "it was other data", "once")
    assert [record.getMessage() for record in caplog.records] == [
        "Not exact after a fault: module.x: it is too large.",
        "Not exact: module.x: it was other data.",
    ]
    assert inexact.known["module.x"].scope == "once"


def test_which_faults_a_finding_concerns() -> None:
    inexact = Inexact()
    inexact.report("always", "a")
    inexact.report("replaced", "b", "replacement")
    inexact.report("resumed", "c", "resume")
    inexact.report("now", "d", "once")
    inexact.report("maybe", "e", "unknown")
    assert inexact.after(replaced=False) == {"always": "a", "now": "d"}
    assert inexact.after(replaced=True) == {"always": "a", "replaced": "b"}  # what has happened once is told once
    inexact.report("now", "another", "once")
    assert inexact.after(replaced=False) == {"always": "a", "now": "another"}


def test_many_of_a_kind_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    inexact = Inexact()
    for number in range(10):
        inexact.report(f"module.items[{number}]", "it is a generator", "fault")
    inexact.report("module.other[1]", "it is a generator", "fault")
    assert [record.message.partition(": ")[2] for record in caplog.records] == [
        *(f"module.items[{number}]: it is a generator." for number in range(3)),
        "module.items[3], and others like it: it is a generator.",
        "module.other[1]: it is a generator.",
    ]
    assert len(inexact.known) == len(inexact.after(replaced=False)) == 11
