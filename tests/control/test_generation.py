import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lightning_replica.control import departures
from lightning_replica.control.faults import Fault
from lightning_replica.control.generation import Generations
from lightning_replica.errors import ConfigurationError, Interrupted, RecoveryError

SEEN = Fault("peer gone", (), "the same words")


@pytest.fixture
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))


def client(store: Any) -> Generations:
    return Generations(dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=10)))


def test_whoever_loses_the_race_joins(store: Any) -> None:
    one, two = Generations(store), client(store)
    first = Fault("exception", (1,), "first")
    one.begin(1, first)
    two.begin(1, Fault("peer gone", (), "second"))
    assert two.fault(1) == first
    assert (one.newest(0), two.newest(0)) == (1, 1)
    assert not one.begun(2)


def test_begin_next_is_never_shared(store: Any) -> None:
    """Also when all say the same: a death must begin a generation that the dead process cannot have joined."""
    begun: list[int] = []
    ready = threading.Barrier(8)

    def race() -> None:
        own = client(store)
        ready.wait()
        begun.append(own.begin_next(0, SEEN))

    threads = [threading.Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(begun) == list(range(1, 9))
    assert Generations(store).fault(3) == SEEN


def everything(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return parts


def test_a_conclusion_has_every_part_in_order(store: Any) -> None:
    later = Generations(store)
    later.gathering.give("report/2", 1, {"rank": 1}, range(2), everything)
    generations = client(store)
    assert generations.conclude("report/2", 0, {"rank": 0}, 2, range(2), 5, everything) == [{"rank": 0}, {"rank": 1}]
    assert later.gathering.result("report/2") == [{"rank": 0}, {"rank": 1}]


def test_a_conclusion_that_does_not_come_names_who_is_missing(store: Any) -> None:
    generations = Generations(store)
    with pytest.raises(
        RecoveryError, match=r"waiting for every rank's part in 'report'.*not reported by then: \[0, 2\]"
    ):
        generations.conclude("report", 1, {}, 0, range(3), 0.05, everything)


def test_waiting_ends_with_the_generation(store: Any) -> None:
    generations = Generations(store)
    generations.begin(1, Fault("death", (2,), "rank 2 is gone"))
    with pytest.raises(Interrupted, match="rank 2 is gone"):
        generations.conclude("report", 0, {}, 0, range(2), 5, everything)


def test_waiting_ends_with_the_verdict(store: Any) -> None:
    generations = Generations(store)
    assert generations.verdict() is None
    generations.give_up("no replacement")
    generations.give_up("something later")
    with pytest.raises(RecoveryError, match="no replacement"):
        generations.conclude("report", 0, {}, 0, range(2), 5, everything)


def test_nobody_waits_for_a_rank_that_has_ended(store: Any) -> None:
    """Unless it has left because of an error, which its supervisor is about to see."""
    departures.leave(store, 1)
    with pytest.raises(RecoveryError, match="Timed out after 1 s"):
        Generations(store).conclude("report/1", 0, {}, 0, range(2), 1, everything)
    departures.end(store, 1)
    with pytest.raises(ConfigurationError, match="Rank 1 ended without an error, and other ranks wait for it"):
        Generations(store).conclude("report/2", 0, {}, 0, range(2), 60, everything)


def test_who_lacks_nobody_repeats_the_verdict_only(store: Any) -> None:
    """All have reported, and one of them is about to conclude."""
    given_up = threading.Event()
    other = client(store).gathering
    thread = threading.Thread(target=other.give, args=("report", 1, {}, range(2), lambda _: given_up.wait()))

    class Concluding(Generations):
        def wait_for(self, *args: Any) -> None:
            thread.start()
            while self.gathering.missing("report", 0, range(2)):
                pass
            client(store).give_up("Told to end.")
            super().wait_for(*args)

    try:
        with pytest.raises(RecoveryError, match=r"Told to end\.$"):
            Concluding(store).conclude("report", 0, {}, 0, range(2), 5, everything)
    finally:
        given_up.set()
        thread.join()


def test_a_rank_that_sees_the_verdict_ends_the_wait_of_all(store: Any) -> None:
    """They are on their way out, and whoever opened a group for all would wait for them."""
    generations = Generations(store)
    generations.give_up("told to end")
    with pytest.raises(RecoveryError, match=r"told to end Ranks that had not reported by then: \[0\]"):
        client(store).conclude("report", 1, {}, 0, range(2), 5, everything)
    with pytest.raises(Interrupted, match="called away"):
        generations.conclude("report", 0, {}, 0, range(2), 5, everything)


def test_whoever_concludes_looks_for_the_verdict(store: Any) -> None:
    generations = Generations(store)
    generations.give_up("told to end")
    with pytest.raises(RecoveryError, match="told to end"):
        generations.conclude("report", 0, {}, 0, range(1), 5, everything)


def come(store: Any, rank: int) -> None:
    """Come to a meeting of ranks 0 and 1."""
    client(store).meet("finished", rank, 0, range(2), 5)


def test_a_meeting_that_was_held_is_passed_even_if_the_world_moves_on(store: Any) -> None:
    thread = threading.Thread(target=come, args=(store, 1))
    thread.start()
    come(store, 0)
    thread.join()
    late = client(store)
    late.begin(1, Fault("death", (2,), "someone died after the meeting"))
    late.wait_for = lambda *_: late_wait()  # type: ignore[method-assign]

    def late_wait() -> None:
        raise Interrupted("the world has moved on before this rank has looked")

    late.gathering.give = lambda *_: None  # type: ignore[method-assign]  # it has come before
    late.meet("finished", 0, 0, range(2), 5)


def test_a_meeting_that_was_not_held_is_interrupted(store: Any) -> None:
    generations = Generations(store)
    generations.begin(1, Fault("death", (2,), "rank 1 is gone"))
    with pytest.raises(Interrupted, match="rank 1"):
        generations.meet("finished", 0, 0, range(2), 5)


def test_a_meeting_that_a_rank_has_left_is_not_held_by_ranks_that_come_later(store: Any) -> None:
    """Otherwise some ranks would end the training, and the others would wait for their reports."""
    left, late = client(store), client(store)
    left.begin(1, Fault("death", (2,), "rank 2 is gone"))
    with pytest.raises(Interrupted, match="rank 2"):
        left.meet("finished", 0, 0, range(2), 5)
    late.begun = lambda generation: False  # type: ignore[method-assign]  # it has not noticed
    with pytest.raises(Interrupted, match="called away"):
        late.meet("finished", 1, 0, range(2), 5)
