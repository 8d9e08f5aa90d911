"""What stacks tell of ranks that wait for others."""

import faulthandler
import json
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from lightning_replica.launch.beacons import Slot
from lightning_replica.launch.stacks import Stack, _stack, parse
from tests.support.ranks import open_world, run_ranks


def finding() -> str:
    """What the stack of this process's main thread tells."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        text = file.read()
    return Stack(text, frames=parse(text, threading.main_thread().ident or 0)).finding


def one_is_late(rank: int, store: Any, backward: bool) -> bool:
    """Rank 1 comes once the stack of rank 0 tells that it waits."""
    open_world(rank, store, 2)
    mesh = init_device_mesh("cpu", (2,))
    placement = Replicate() if backward else Partial()  # so only one of both passes has a collective
    own = DTensor.from_local(torch.ones(4, 2, requires_grad=True), mesh, [placement], run_check=False)
    loss = None if not backward else own.redistribute(placements=[Shard(0)]).to_local().sum()

    def look() -> None:
        while finding() != "collective":
            pass
        store.set("it waits", "")

    if rank == 0:
        looks = threading.Thread(target=look, daemon=True)
        looks.start()
    else:
        store.wait(["it waits"])
    if loss is None:
        own.redistribute(placements=[Replicate()])
    else:
        loss.backward()
    return True


@pytest.mark.parametrize("backward", [False, True])
def test_a_collective_of_dtensor_is_seen_to_wait(backward: bool) -> None:
    assert run_ranks(2, one_is_late, backward) == [True, True]


def wait_in(rank: int, store: Any, name: str) -> str:
    """Rank 0 waits in a line that was compiled from the file ``name``; returns what its stack tells, and the file."""
    open_world(rank, store, 2)
    found = []

    def look() -> None:
        while True:
            with tempfile.TemporaryFile("w+") as file:
                faulthandler.dump_traceback(file)
                file.seek(0)
                seen = _stack(Slot(process=os.getpid(), thread=threading.main_thread().ident or 0), file.read())
            if seen.frames[0].file.endswith(Path(name).name):
                found.append([seen.finding, seen.frames[0].file])
                break
        store.set("it waits", "")

    if rank == 1:
        store.wait(["it waits"])
        dist.all_reduce(torch.ones(1))
        return ""
    work = dist.all_reduce(torch.ones(1), async_op=True)
    looks = threading.Thread(target=look)
    looks.start()
    exec(compile(Path(name).read_text(), name, "exec"), {"work": work})
    looks.join()
    return json.dumps(found)


@pytest.mark.parametrize("name", ["train.py", "größe/später 🦊.py"])
@pytest.mark.parametrize("relative", [True, False])
def test_the_line_of_a_wait_is_found(
    name: str, relative: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("work.wait()\n")
    monkeypatch.chdir(tmp_path)
    found, _ = run_ranks(2, wait_in, name if relative else str(path))
    assert json.loads(found) == [["collective", str(path)]]
