"""HCCL's halves of process groups, as a simulated NPU has them: who is connected to whom.

A group connects at its first collective, with the help of a store. Where its ranks do not have the same connections,
collectives wait for ever; here, whoever waits too long ends with `BROKEN_RULE`.
"""

import os
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup

from lightning_replica._compat.torch import backend_of

BROKEN_RULE = 99
HCCL, OTHER_HALF = "simulated_hccl", torch.device("privateuseone")
PATIENCE_S = 60.0


def broken(rule: str) -> None:
    sys.stderr.write(f"a rule of torch_npu's is broken: {rule}\n")
    sys.stderr.flush()
    os._exit(BROKEN_RULE)


class Hccl:
    """The device's half of a group: its connections. What goes over them goes over gloo's.

    Args:
        own: What torch has for it.
        store: Where ranks find each other.
        rank: In the group.
        size: Of the group.

    Attributes:
        settled: Whether it goes on or was given up, since the device was stopped last.
    """

    def __init__(self, own: Any, store: dist.Store, rank: int, size: int) -> None:
        self.own, self._store, self._rank, self._size = own, store, rank, size
        self.settled = True
        self._connection, self._resumed = "", 0
        self._tried: list[str] = []  # keys
        self._together = False  # all ranks are known to have this connection

    def name(self) -> str:
        return HCCL

    def get_hccl_comm_name(self, rankid: int, init_comm: bool = True) -> str:
        assert not init_comm
        return self._connection

    def abort_hccl_comm(self, reason: str) -> None:
        self.settled, self._together = True, False
        self._connection, self._tried = "", []

    def resume_hccl_comm(self, device_id: int) -> None:
        self.settled, self._together = True, False
        self._resumed += bool(self._connection)

    def _delete_tcpstore_key(self) -> None:
        for key in self._tried:
            self._store.delete_key(key)

    def work(self, look: Callable[[], None] = lambda: None) -> None:
        """A collective begins; ``look`` raises if the device is stopped meanwhile."""
        if not self._connection:
            self._connect(look)
        if not self._together:
            here = f"{self._connection} {self._resumed}"
            self._store.add(here, 1)
            self._wait(lambda: self._store.add(here, 0) == self._size, look)
            self._together = True

    def _connect(self, look: Callable[[], None]) -> None:
        key = str(len(self._tried))
        self._tried.append(key)
        if self._rank == 0:
            self._store.set(key, uuid.uuid4().hex)
        self._wait(lambda: self._store.check([key]), look)
        self._connection = self._store.get(key).decode()

    def _wait(self, come: Callable[[], bool], look: Callable[[], None]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not come():
            look()
            if time.monotonic() > deadline:
                broken("ranks of a group that have other connections")
            time.sleep(0.001)


HALVES: list[Hccl] = []


def half_of(group: Any) -> Hccl:
    own = backend_of(group, OTHER_HALF)
    return next(half for half in HALVES if half.own is own)


def make_half(options: Any, _: Any) -> Any:
    """What torch calls to open it."""
    make = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)  # the former from torch 2.10
    own = make(options.group_rank, options.group_size)
    HALVES.append(Hccl(own, options.store, options.group_rank, options.group_size))
    return own
