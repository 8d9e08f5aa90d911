"""In which order buckets go through the stages of a reduction, on the host and on a device."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lightning_replica.core import pending_work
from lightning_replica.core.pending_work import Ordered, Work
from lightning_replica.sharding.levels import IN_FLIGHT, Job, Stage
from lightning_replica.sharding.pipeline import Pipeline

BUCKETS = 7


class Done:
    """A collective of the host, which ends when the test says so."""

    def __init__(self) -> None:
        self.done = False

    def is_completed(self) -> bool:
        return self.done

    def wait(self, *_: Any) -> None:
        self.done = True


class OnDevice:
    """A collective of a device, which ends while the host waits for it."""

    def __init__(self) -> None:
        self.looks = self.ordered = 0

    def is_completed(self) -> bool:
        self.looks += 1
        return self.looks > 2

    def wait(self, *_: Any) -> None:
        self.ordered += 1


class Traced:
    """A stage that writes down what it is asked."""

    rooms: tuple[()] = ()

    def __init__(self, name: str, trace: list[str], work: Callable[[], Work]) -> None:
        self.name, self.trace, self.work = name, trace, work

    def begin(self, job: Any) -> None:
        job.pending = [self.work()]
        self.trace.append(f"{self.name}{job.bucket}+")

    def end(self, job: Any) -> None:
        self.trace.append(f"{self.name}{job.bucket}-")


def pipeline(trace: list[str], *begun: Callable[[], Any]) -> Pipeline:
    buffers = SimpleNamespace(complete=lambda bucket: trace.append(f"{bucket}"))
    jobs = [Job(cast("Any", buffers), cast("Any", number), missing=1) for number in range(BUCKETS)]
    stages = [cast("Stage", Traced(name, trace, work)) for name, work in zip("abc", begun, strict=False)]
    return Pipeline(jobs, stages, lambda: None)


def fill(running: Pipeline, count: int) -> None:
    """Backward completes so many buckets."""
    for job in running.jobs[:count]:
        if job.missing:
            job.missing = 0
            running.advance()


def ordered() -> Ordered:
    return Ordered(cast("Any", OnDevice()))


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    pending_work.all_ended(0.0)


def test_a_device_does_not_wait_for_a_collective_until_a_stage_is_full() -> None:
    trace: list[str] = []
    running = pipeline(trace, ordered, ordered)
    fill(running, IN_FLIGHT)
    assert not [step for step in trace if step.endswith("-")]
    fill(running, IN_FLIGHT + 2)
    assert [step for step in trace if step.endswith("-")] == ["a0-", "a1-"]
    running.finish()
    assert trace[-1] == f"b{BUCKETS - 1}-"


def test_the_host_waits_for_a_device_while_backward_follows_and_only_then() -> None:
    """Else what backward queues behind a collective would fill the device's queue, which blocks the host."""
    first: list[OnDevice] = []

    def begun() -> Ordered:
        first.append(OnDevice())
        return Ordered(cast("Any", first[-1]))

    running = pipeline([], begun, ordered)
    fill(running, IN_FLIGHT + 2)
    assert [work.looks for work in first] == [3, 3, 0, 0, 0, 0]
    running.finish()
    assert [work.looks for work in first] == [3, 3, *[0] * (BUCKETS - 2)]
    assert [work.ordered for work in first] == [1] * BUCKETS


def test_a_device_begins_collectives_in_an_order_that_time_does_not_change() -> None:
    """Ranks whose last buckets have unused parameters learn only at the end of backward that these are complete."""
    traces: list[list[str]] = []
    for complete in range(BUCKETS + 1):
        trace: list[str] = []
        running = pipeline(trace, ordered, ordered, ordered)
        fill(running, complete)
        running.finish()
        traces.append([step for step in trace if step[-1] == "+"])
    assert all(trace == traces[0] for trace in traces)


@pytest.mark.parametrize("work", [ordered, Done])
def test_buckets_come_in_the_same_order_in_every_stage(work: Callable[[], Any]) -> None:
    trace: list[str] = []
    running = pipeline(trace, work, work, work)
    fill(running, 5)
    running.finish()
    for stage in "abc":
        for mark in "+-":
            steps = [step for step in trace if step[0] == stage and step[-1] == mark]
            assert steps == [f"{stage}{number}{mark}" for number in range(BUCKETS)]
        under_way = 0
        for step in trace:
            under_way += (step[0], step[-1]) == (stage, "+")
            under_way -= (step[0], step[-1]) == (stage, "-")
            assert under_way <= IN_FLIGHT or stage == "c"


def test_the_host_goes_on_as_soon_as_a_collective_has_ended() -> None:
    trace: list[str] = []
    running = pipeline(trace, Done, Done)
    fill(running, 2)
    assert trace == ["0", "a0+", "1", "a1+"]
    cast("Any", running.jobs[0].pending[0]).done = True
    running.advance()
    assert trace[4:] == ["a0-", "b0+"]
