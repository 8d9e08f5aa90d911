"""Incidents are reported to the user's hooks, also where one of them raises."""

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_replica.trainer import incidents
from lightning_replica.trainer.incidents import Incidents


def test_a_hook_that_raises_loses_no_other_incident(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def hook(incident: Any) -> None:
        seen.append(incident.number)
        if incident.number == 1:
            raise RuntimeError("in the user's hook")

    over = [SimpleNamespace(number=number, reporter=1) for number in (1, 2, 3)]
    account = SimpleNamespace(close=lambda step: [over.pop(0) for _ in range(len(over))])
    monkeypatch.setattr(incidents, "Account", lambda *_: account)
    session: Any = SimpleNamespace(rank=0, world=SimpleNamespace(generations=None, size=2, start_generation=0))
    own = Incidents(trainer=None, session=session, hooks=SimpleNamespace(incident=hook))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="in the user's hook"):
        own.publish(5)
    own.publish(6)
    assert seen == [1, 2, 3]
