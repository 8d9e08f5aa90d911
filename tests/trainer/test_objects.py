"""Lightning's own collectives, against what Lightning's DDP strategy computes."""

import pathlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _sync_ddp

from lightning_replica.core import pending_work
from lightning_replica.errors import ConfigurationError
from lightning_replica.trainer import objects
from tests.support.ranks import open_world, run_ranks


def wait(work: Any, tensor: Any = None) -> None:
    pending_work.wait(work, lambda: None)


def compare(rank: int, store: Any) -> Any:
    open_world(rank, store, 3)
    same = []
    ops: list[Any] = ["mean", "avg", "sum", dist.ReduceOp.MAX]
    for op in ops:
        for value in (torch.tensor([rank + 0.1, 7.0]), torch.tensor([[rank + 1, 5]])):
            if op in ("mean", "avg") and not value.is_floating_point():
                continue  # Lightning divides integers after the sum, too, but into a float that it does not reduce
            ours, theirs = objects.reduce(value.clone(), None, op, wait), _sync_ddp(value.clone(), None, op)
            same.append(torch.equal(ours, theirs))
    gathered = objects.all_gather(torch.tensor([float(rank), 2.0]).requires_grad_(), None, wait)
    sent = {"rank": rank, "list": [1, "two", None]}
    return [all(same), len(same), gathered.tolist(), gathered.requires_grad, objects.broadcast(sent, 2, wait)]


def test_they_compute_what_lightning_computes() -> None:
    results = run_ranks(3, compare)
    assert all(isinstance(result, list) for result in results), results
    for same, count, gathered, has_gradient, received in results:
        assert same
        assert count == 6
        assert gathered == [[0.0, 2.0], [1.0, 2.0], [2.0, 2.0]]
        assert not has_gradient
        assert received == {"rank": 2, "list": [1, "two", None]}


def test_an_unknown_operation() -> None:
    with pytest.raises(ConfigurationError, match="reduce_op='median' is not known. Use one of sum, mean"):
        objects.reduce(torch.ones(1), None, "median", wait)


def leave(rank: int, store: Any) -> Any:
    """Rank 0 gives a wait up; the collective is remembered until rank 1 comes."""
    open_world(rank, store, 2)
    if rank == 1:
        store.wait(["given up"])
        wait(dist.all_reduce(torch.ones(1), async_op=True))
        return True

    def enough() -> None:
        raise TimeoutError

    try:
        pending_work.wait(dist.all_reduce(torch.ones(1), async_op=True), enough)
    except TimeoutError:
        before = pending_work.all_ended(0.01)
    work = dist.all_reduce(torch.ones(1), async_op=True)
    pending_work.track(work)
    store.set("given up", "1")
    return [before, pending_work.all_ended(0.0)]


def test_a_collective_that_nobody_waits_for_is_not_forgotten() -> None:
    (before, _), other = run_ranks(2, leave)
    assert before is False
    assert other is True


class Own:
    """A type that ranks do not send."""


def refuse(rank: int, store: Any) -> Any:
    open_world(rank, store, 2)
    try:
        objects.broadcast([Own()] if rank == 1 else None, 1, wait)
    except ConfigurationError as error:
        return [str(error), objects.broadcast(pathlib.PurePosixPath("x") if rank == 1 else None, 1, wait).name]


def test_an_object_that_would_have_to_be_unpickled_is_refused_on_every_rank() -> None:
    first, second = run_ranks(2, refuse)
    assert first == second
    assert (
        "rank 1 broadcasts cannot be sent: it holds tests.trainer.test_objects.Own. Ranks do not unpickle" in first[0]
    )
    assert first[1] == "x"
