"""Process groups that cannot be opened."""

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lightning_replica.devices.cpu import abort_group
from lightning_replica.errors import CollectiveError, Interrupted
from lightning_replica.recovery import groups
from lightning_replica.recovery.groups import ProcessGroups
from tests.support.ranks import run_ranks

LONG_S = 300.0


def none(_: timedelta) -> Iterable[dist.ProcessGroup]:
    return ()


def leaves_half_way(rank: int, store: Any) -> str:
    """Rank 1 has told where it listens, and goes on to the next generation before it connects."""

    def check() -> None:
        if rank == 1:
            store.set("left", "1")
            raise Interrupted("the world moves on")

    groups._CONNECT_S = 0.5  # in this process only
    own = ProcessGroups(store, rank, 2, "gloo", LONG_S, abort_group, check)
    if rank == 0:
        store.wait(["left"])
    with pytest.raises(Interrupted if rank else CollectiveError) as error:
        own.open(3, none)
    return str(error.value)


def test_a_peer_that_leaves_half_way(tmp_path: Any) -> None:
    """Who is left connecting says so in time for the next generation: see [Note: a cut connection]."""
    stayed, _ = run_ranks(2, leaves_half_way)
    assert "Could not open the process groups of generation 3" in stayed, stayed


def timeouts(rank: int, store: Any) -> list[float]:
    own = ProcessGroups(store, rank, 2, "gloo", LONG_S, abort_group)
    given: list[timedelta] = []

    def make(timeout: timedelta) -> Iterable[dist.ProcessGroup]:
        given.append(timeout)
        return [dist.new_group([0, 1], timeout=timeout)]

    own.open(0, make)
    pair = own.add([0, 1])
    opened = [*own._groups]
    assert pair in opened
    found = [group._get_backend(group._device_types[0]).options._timeout for group in opened]
    own.close()
    return [timeout.total_seconds() for timeout in (*given, *found)]


def test_an_open_group_has_the_time_that_was_asked_for() -> None:
    """Connecting may take 10 s, collectives as long as the user wants."""
    connecting = groups._CONNECT_S + 2 * groups._CONNECT_S_PER_RANK
    assert run_ranks(2, timeouts) == [[connecting, LONG_S, LONG_S, LONG_S]] * 2
