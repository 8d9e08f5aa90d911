"""An incident's line in the log: what is written can be read."""

import json
from datetime import datetime, timezone
from typing import Any, get_args

from hypothesis import given
from hypothesis import strategies as st

from lightning_replica.control.faults import Detected, Fault
from lightning_replica.core.points import PHASES
from lightning_replica.recovery.incident import Incident, Transferred

ranks = st.lists(st.integers(0, 999), max_size=4).map(tuple)
seconds = st.integers(0, 10**9).map(lambda microseconds: microseconds / 10**6)  # as exact as a line is
faults = st.builds(Fault, st.sampled_from(get_args(Detected)), ranks, st.text())
moves = st.builds(Transferred, st.integers(0, 999), st.integers(0, 999), st.integers(0, 2**50), seconds, st.booleans())
times = st.datetimes(datetime(2000, 1, 1), timezones=st.just(timezone.utc)).map(lambda time: time.isoformat())
parts: dict[str, Any] = {
    "number": st.integers(1), "time": times, "outcome": st.sampled_from(["recovered", "failed"]), "error": st.text(),
    "faults": st.lists(faults, min_size=1, max_size=3).map(tuple), "generation": st.integers(0),
    "step": st.integers(-1), "epoch": st.integers(0), "kind": st.sampled_from(["batch", "tail"]),
    "replaced": ranks, "forward": ranks,
    "moves": st.lists(moves, max_size=3).map(tuple), "phases_s": st.fixed_dictionaries(dict.fromkeys(PHASES, seconds)),
    "recovery_s": seconds, "first_good_step_s": st.none() | seconds, "redone_batches": st.integers(0),
    "redone_s": seconds, "reporter": st.just(-1),
}  # fmt: skip


@given(st.builds(Incident, **parts))
def test_a_line_holds_the_whole_incident(incident: Incident) -> None:
    line = incident.to_json()
    assert "\n" not in line
    read = Incident.of_json(line)
    assert json.loads(read.to_json()) == json.loads(line)
    rounded = {"phases_s": incident.phases_s}  # divided by 1000, which may change the last bit
    assert {**vars(read), **rounded} == {**vars(incident), **rounded}
