"""What a handle costs: the same collective through torch's default group (a handle) and on the group behind it.

    python benchmarks/handles.py

Two ranks all-reduce one number over gloo, with and without a handle in turn. The package's own collectives in every
step do not go through handles; those of Lightning, torchmetrics and user code do.
"""

import multiprocessing
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from common import spread, write

from lightning_replica.devices.cpu import Cpu
from lightning_replica.groups.world import ProcessGroups

RANKS, ROUNDS, CALLS = 2, 40, 200


def measure(rank: int, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    own = ProcessGroups(store, rank, RANKS, Cpu(), 60)
    own.open(0, lambda _: ())
    one = torch.ones(1)
    behind = dist.group.WORLD.behind
    seconds: dict[str, list[float]] = {"handle": [], "behind": []}
    for _ in range(ROUNDS):
        for name, group in (("handle", None), ("behind", behind)):
            dist.barrier()
            began = time.perf_counter()
            for _ in range(CALLS):
                dist.all_reduce(one, group=group)
            seconds[name].append((time.perf_counter() - began) / CALLS * 1e6)
    own.close()
    if rank == 0:
        results.put(seconds)


def main() -> None:
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = context.Queue()
    processes = [context.Process(target=measure, args=(rank, store.port, results)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    seconds = results.get()
    for process in processes:
        process.join()
    more = [handle - behind for handle, behind in zip(seconds["handle"], seconds["behind"], strict=True)]
    rows = [[name, spread(values)] for name, values in seconds.items()] + [["difference", spread(more)]]
    write(
        "handles",
        "An all-reduce of one number, through a handle and without one",
        ["", "us a call: median (middle half)"],
        rows,
        f"{ROUNDS} rounds of {CALLS} calls each, in turns; {RANKS} ranks. Median difference"
        f" {statistics.median(more):.1f} us.",
        seconds,
    )


if __name__ == "__main__":
    main()
