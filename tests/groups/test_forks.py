"""Children that are forked from a rank, such as a DataLoader's workers, leave its process groups alone."""

import gc
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from lightning_replica.devices.cpu import Cpu
from lightning_replica.groups.world import ProcessGroups
from tests.support.ranks import run_ranks

destroyed: list[int] = []


class Group:
    """In place of a process group, which hangs, aborts or crashes a child that destroys it, or does none of these."""

    def __init__(self) -> None:
        self.cycle = self

    def __del__(self) -> None:
        destroyed.append(os.getpid())


class Collecting(Dataset[torch.Tensor]):
    """Its worker's garbage collector runs, as it does at some time in any worker."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        gc.collect()
        return torch.tensor(len(destroyed))


def destroyed_by_a_worker(rank: int, store: Any) -> int:
    ProcessGroups(dist.HashStore(), 0, 1, Cpu(), 60)
    gc.disable()  # the rank itself collects its garbage later
    Group()
    (count,) = DataLoader(Collecting(), batch_size=None, num_workers=1, multiprocessing_context="fork")
    gc.enable()
    return int(count)


def test_a_worker_does_not_destroy_what_its_rank_has_left() -> None:
    """See [Note: forks]."""
    assert run_ranks(1, destroyed_by_a_worker) == [0]
