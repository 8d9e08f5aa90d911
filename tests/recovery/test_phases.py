import pytest

from lightning_replica.core.points import listen
from lightning_replica.recovery.phases import Phase, Timeline


def test_phases_follow_each_other_and_a_fault_begins_again() -> None:
    seen: list[str] = []
    stop = listen(seen.append)
    try:
        timeline = Timeline()
        for phase in (Phase.STOP, Phase.CLEAN, Phase.STOP, *list(Phase)[1:]):
            timeline.enter(phase)
        timeline.end()
    finally:
        stop()
    assert seen == ["stop", "clean", "stop", "clean", "regroup", "repair", "rollback", "resume"]
    assert set(timeline.seconds) == set(Phase)
    assert timeline.total_s >= sum(timeline.seconds.values()) * 0.99


def test_no_phase_is_skipped() -> None:
    timeline = Timeline()
    timeline.enter(Phase.STOP)
    with pytest.raises(RuntimeError, match="from Phase.STOP to Phase.CLEAN, not to Phase.REPAIR"):
        timeline.enter(Phase.REPAIR)
