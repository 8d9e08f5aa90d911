"""Process groups that cannot be opened, and those that go on with what they had."""

from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_replica._compat.torch import backend_of
from lightning_replica.devices.cpu import Cpu
from lightning_replica.errors import CollectiveError, Interrupted
from lightning_replica.groups import world as groups
from lightning_replica.groups.handles import Handle
from lightning_replica.groups.patient_store import PatientStore
from lightning_replica.groups.world import ProcessGroups
from tests.support.doubles import overriding, put
from tests.support.ranks import meet, run_ranks

LONG_S = 300.0


def none(_: timedelta) -> Iterable[dist.ProcessGroup]:
    return ()


def leaves_half_way(rank: int, store: Any) -> list[str]:
    """Rank 1 tells where it listens, leaves, and never answers; which rank calls the other is chance."""

    def wait(*_: Any) -> None:
        raise Interrupted("the world moves on")

    groups._CONNECT_S = 0.5  # in this process only
    if rank == 1:
        PatientStore.wait = wait  # type: ignore[method-assign, assignment]
    own = ProcessGroups(store, rank, 2, Cpu(), LONG_S)
    said = []
    for generation in range(8):
        with suppress(Interrupted):
            try:
                own.open(generation, none)
            except CollectiveError as error:
                said.append(str(error))
        own.close()
    return said


def test_a_peer_that_leaves_half_way() -> None:
    """Who is left connecting says so in time for the next generation: see [Note: a cut connection]."""
    stayed, _ = run_ranks(2, leaves_half_way)
    assert stayed, "Never was it rank 0 that waited to be called."
    assert all("Could not open the process groups of generation" in line for line in stayed), stayed


def called_away_while_it_connects(rank: int, store: Any) -> list[str]:
    original: Any = vars(groups)["open_group"]
    opening: list[int] = []

    def open_group(*args: Any) -> dist.ProcessGroup:
        opening.append(rank)
        return original(*args)

    def check() -> None:
        if opening and rank == 1:
            raise Interrupted("the world moves on")

    put(groups, "open_group", open_group)  # in this process only
    groups._CONNECT_S = 0.5
    own = ProcessGroups(store, rank, 2, Cpu(), LONG_S, check)
    said = []
    for generation in range(8):
        opening.clear()
        try:
            own.open(generation, none)
            dist.barrier()  # who closes sooner cuts the connection of a peer that is still at it
        except (Interrupted, CollectiveError) as error:
            said.append(str(error))
        own.close()
    return said


def test_a_rank_that_is_called_away_while_it_connects() -> None:
    """It connects first: the other one would wait for it, and could not be called away."""
    assert run_ranks(2, called_away_while_it_connects) == [[], []]


def fails_alone(rank: int, store: Any) -> int:
    failing = [rank == 1]

    def check() -> None:
        if failing[0]:
            raise Interrupted("the world moves on")

    own = ProcessGroups(store, rank, 2, Cpu(), LONG_S, check)
    if rank == 1:
        with pytest.raises(Interrupted):
            own.open(1, none)
        own.close()
    failing[0] = False
    own.open(2, none)
    dist.barrier()
    own.close()
    return rank


def test_an_opening_that_failed_on_one_rank_leaves_no_trace() -> None:
    """torch counts openings, and ranks meet by that number."""
    assert run_ranks(2, fails_alone) == [0, 1]


def users_own(rank: int, store: Any) -> bool:
    """Rank 0 waits in a group of the user's, whose backend is spelled in another way, for rank 1, who never comes."""
    own = ProcessGroups(store, rank, 2, Cpu(), LONG_S)
    own.open(0, none)
    group = dist.new_group([0, 1], backend="cpu:gloo")
    assert isinstance(group, Handle)
    dist.barrier(group)  # connected, at both ends
    if rank == 1:
        store.wait(["aborted"])
        own.close()
        return True
    work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    waits = not work.is_completed()
    own.abort()
    with pytest.raises(RuntimeError):
        work.wait(timedelta(seconds=20))
    ended = work.is_completed()
    store.set("aborted", "1")
    own.close()
    return waits and ended


def test_groups_of_the_user_are_aborted_too() -> None:
    assert run_ranks(2, users_own) == [True, True]


def timeouts(rank: int, store: Any) -> list[float]:
    own = ProcessGroups(store, rank, 2, Cpu(), LONG_S)
    given: list[timedelta] = []

    def make(timeout: timedelta) -> Iterable[dist.ProcessGroup]:
        given.append(timeout)
        return [dist.new_group([0, 1], timeout=timeout)]

    own.open(0, make)
    pair = own.add([0, 1])
    dist.barrier(pair)  # connected, at both ends
    opened = [*own._groups]
    assert pair in opened
    found = [group._get_backend(group._device_types[0]).options._timeout for group in opened]
    own.close()
    return [timeout.total_seconds() for timeout in (*given, *found)]


def test_an_open_group_has_the_time_that_was_asked_for() -> None:
    """Connecting may take 10 s, collectives as long as the user wants."""
    connecting = (groups._CONNECT_S + 2 * groups._CONNECT_S_PER_RANK) / groups._GLOO_WAITS
    assert run_ranks(2, timeouts) == [[connecting, LONG_S, LONG_S, LONG_S]] * 2


OTHER = torch.device("privateuseone")


@overriding()
class TwoHalves(Cpu):
    """A device whose connections outlive an abort. They are gloo's, and serve the host's tensors."""

    backend, is_host = f"cpu:gloo,{OTHER.type}:twin", False

    def resume_groups(self, groups: Any) -> bool:
        return True


def open_twin(options: Any, _: Any) -> Any:
    return dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)


def reduced(backend: Any, rank: int) -> float:
    tensor = torch.full((1,), rank + 1.0)
    backend.allreduce([tensor]).wait()
    return float(tensor)


def goes_on(rank: int, store: Any) -> dict[str, Any]:
    dist.Backend.register_backend("twin", open_twin, extended_api=True, devices=[OTHER.type])
    shut_down = []
    dist.ProcessGroup.shutdown = lambda group: shut_down.append(group.group_name)  # type: ignore[assignment]
    own = ProcessGroups(store, rank, 2, TwoHalves(), LONG_S)
    own.open(0, lambda _: [dist.new_group([0, 1])])
    before = [backend_of(group, OTHER) for group in own._groups]
    users = dist.new_group([0, 1])
    added = own.add([0, 1])  # and never removed, as in a recovery that is cut short
    without_successor = [added.group_name, users.behind.group_name]
    del added
    own.leave()
    held = dict.fromkeys(range(2), own.held())
    own.open(1, lambda _: [dist.new_group([0, 1])], resume=True, held=held)
    after = [backend_of(group, OTHER) for group in own._groups[:2]]
    later = backend_of(dist.new_group([0, 1]).behind, OTHER)
    dist.all_reduce(torch.ones(1), group=users)  # the handle is as good as before
    result = {
        "same": [old is new for old, new in zip(before, after, strict=True)],
        "shut down": shut_down == without_successor,
        "sums": [reduced(half, rank) for half in (*after, later)],
        "later": later not in before,
        "name": dist.get_backend(),
    }
    dist.all_reduce(torch.ones(1))  # the host's half is new
    own.close()
    return result


def test_the_devices_half_of_a_group_outlives_it() -> None:
    expected = {"same": [True] * 2, "shut down": True, "sums": [3.0] * 3, "later": True, "name": TwoHalves.backend}
    assert run_ranks(2, goes_on) == [expected] * 2


def cannot_go_on(rank: int, store: Any) -> str:
    own = ProcessGroups(store, rank, 2, Cpu(), LONG_S)
    own.open(0, none)
    meet(rank, store, 2, "open")  # to leave closes connections, which the other rank may still be making
    own.leave()
    with suppress(CollectiveError):
        own.open(1, none, resume=True)
        return "opened"
    own.open(2, none)
    dist.all_reduce(torch.ones(1))
    own.close()
    return "new ones"


def test_where_it_does_not_the_next_ones_are_new() -> None:
    assert run_ranks(2, cannot_go_on) == ["new ones"] * 2
