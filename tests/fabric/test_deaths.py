"""A rank is lost in a loop under Fabric: the others end with an error that names it, and says what a loop must do."""

import os
from typing import Any

import pytest
import torch

from lightning_replica import FabricStrategy, RecoveryError
from lightning_replica.devices.gloo import abort_group
from lightning_replica.fabric import census
from tests.fabric.loop import Case, Training, launch
from tests.support.doubles import put
from tests.support.ranks import open_world, run_ranks
from tests.support.typed import world_group

WORLD = 4
PLACES = {
    "forward": "Forward",  # sends buffers
    "backward": "The reduction of gradients",
    "step": "The optimizer's step",
    "save": "Collecting the optimizer's state",
    "barrier": "`barrier`",
    "reduce": "`all_reduce`",
    "gather": "`all_gather`",
    "broadcast": "`broadcast`",
}


def loses(rank: int, store: Any, place: str, lost: int, how: str) -> Any:
    open_world(rank, store, WORLD)
    case = Case(strategy={"shared_memory": lost != 2})
    training = Training(launch(rank, WORLD, FabricStrategy(**case.strategy), case), case)
    fabric, model, optimizer = training.fabric, training.model, training.optimizer
    training.run(range(2))
    torch.distributed.barrier()

    def goes() -> None:
        if rank != lost:
            return
        if how == "raises":
            raise ArithmeticError("injected")
        os._exit(9)

    try:
        if place in ("forward", "backward", "step"):
            goes() if place == "forward" else None
            loss = model(torch.arange(4)).mean()
            goes() if place == "backward" else None
            fabric.backward(loss)
            goes()
            optimizer.step()
        else:
            goes()
            work = {
                "save": lambda: fabric.save("never", {"optimizer": optimizer}),
                "barrier": fabric.barrier,
                "reduce": lambda: fabric.all_reduce(torch.ones(1)),
                "gather": lambda: fabric.all_gather(torch.ones(1)),
                "broadcast": lambda: fabric.broadcast("all", src=3),
            }
            work[place]()
        fabric.barrier()  # not every rank of a collective needs all others
    except RecoveryError as error:
        return str(error)
    except ArithmeticError:
        os._exit(1)  # as a script does that nobody saves
    return "went on"


@pytest.mark.parametrize(("place", "lost"), [(place, 1 + number % 3) for number, place in enumerate(PLACES)])
def test_the_others_say_what_to_do(place: str, lost: int) -> None:
    results = run_ranks(WORLD, loses, place, lost, "dies")
    assert results[lost] == {"died": 9}
    others = results[:lost] + results[lost + 1 :]
    assert any(said.startswith(f"{PLACES[place]} has failed (") for said in others), others
    for said in others:
        assert f"). Rank {lost} is gone: the process has ended. Fabric leaves" in said
        assert "must save (`fabric.save`) every few steps" in said
        assert "docs/fabric.md shows one" in said


def test_rank_0_and_an_exception() -> None:
    results = run_ranks(WORLD, loses, "backward", 0, "raises")
    assert results[0] == {"died": 1}
    for said in results[1:]:
        assert "Rank 0 is gone: the process has ended." in said


def silent(rank: int, store: Any) -> Any:
    """A rank that computes for long, and ranks of which this machine sees no process."""
    open_world(rank, store, WORLD)
    census.PATIENCE_S = 0.5
    fabric = launch(rank, WORLD, "replica_zero")
    torch.distributed.barrier()
    if rank == 1:
        os._exit(9)
    if rank in (2, 3):
        store.set(f"gone/{rank}", "")
        store.wait(["said"])
        return None
    store.wait(["gone/2", "gone/3"])
    put(census, "machine", lambda: 0)
    try:
        fabric.barrier()
    except RecoveryError as error:
        store.set("said", "")
        return str(error)
    return "went on"


def test_ranks_of_which_nothing_is_seen() -> None:
    said, *_ = run_ranks(WORLD, silent)
    assert "). Ranks 1, 2, 3 are silent for 0.5 s: lost, ended by an error, or busy. Fabric" in said


def without_store(rank: int, store: Any) -> Any:
    open_world(rank, store, 2)
    fabric = launch(rank, 2, "replica_zero")

    def gone(*_: Any) -> None:
        raise torch.distributed.DistNetworkError("Connection reset by peer")

    put(census, "default_store", lambda: type("Gone", (), {"set": gone})())
    if rank == 1:
        os._exit(9)
    try:
        fabric.barrier()
    except RecoveryError as error:
        return str(error)
    return "went on"


def test_the_store_is_gone_too() -> None:
    said, _ = run_ranks(2, without_store)
    assert "Rank 0 cannot reach the store: the process that serves it, mostly rank 0, is gone. Fabric" in said


def all_there(rank: int, store: Any) -> Any:
    open_world(rank, store, 2)
    fabric = launch(rank, 2, "replica_zero")
    if rank == 0:
        abort_group(world_group())
    try:
        fabric.barrier()
    except RecoveryError as error:
        return str(error)
    return "went on"


def test_nobody_is_lost() -> None:
    for said in run_ranks(2, all_there):
        assert "All ranks answer, so none is lost" in said


def own_error(rank: int, store: Any) -> Any:
    open_world(rank, store, 2)
    fabric = launch(rank, 2, "replica_zero")
    said = []
    for work in (
        lambda: fabric.backward(torch.zeros(1)),
        lambda: fabric.all_reduce(torch.zeros(1), reduce_op="nonsense"),
    ):
        try:
            work()
        except Exception as error:
            said.append(type(error).__name__)
    return said


def test_errors_of_the_user_s_own_stay_as_they_are() -> None:
    assert run_ranks(2, own_error) == [["RuntimeError", "AttributeError"]] * 2
