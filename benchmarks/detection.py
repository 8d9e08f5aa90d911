"""How soon a fault is noticed, by ranks that are blocked in a collective and by the supervisor.

    python benchmarks/detection.py

It uses real processes, real gloo groups, and the package's own waits and supervisor; nothing is imported or trained in
between. All times come from the machine's monotonic clock.
"""

import argparse
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from common import spread, write

from lightning_replica.control.faults import Fault
from lightning_replica.control.generation import Generations
from lightning_replica.control.monitor import Monitor
from lightning_replica.core import pending_work
from lightning_replica.core.options import RecoveryOptions
from lightning_replica.devices.cpu import Cpu
from lightning_replica.errors import CollectiveError, Interrupted
from lightning_replica.groups.world import ProcessGroups
from lightning_replica.launch.supervisor import Supervisor

RANKS = 4


def client(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))


def blocked(rank: int, port: int, count: int, results: Any) -> None:
    """Wait in a collective that rank 0 never joins; rank 0 raises instead."""
    torch.set_num_threads(1)
    store = client(port)
    generations = Generations(store)
    groups = ProcessGroups(store, rank, RANKS, Cpu(), 60)
    monitor = Monitor(Generations(client(port)), groups.abort, lambda: None)
    monitor.start(0)
    seen = []
    for generation in range(count):
        groups.open(generation, lambda timeout: ())
        monitor.moved_to(generation)
        if rank == 0:
            generations.meet("blocked", generation, RANKS, 60)
            time.sleep(0.1)  # by now the others are in the collective
            began = time.monotonic()
            generations.begin(generation + 1, Fault("exception", (0,), "raised"))
            store.set(f"began/{generation}", str(began))
        else:
            generations.meet("blocked", generation, RANKS, 60)
            try:
                pending_work.wait(dist.all_reduce(torch.ones(10), async_op=True), monitor.check_now)
            except (Interrupted, CollectiveError):
                ended = time.monotonic()
            seen.append(ended - float(store.get(f"began/{generation}")))
        groups.close()
        generations.meet("closed", generation + 1, RANKS, 60)
    monitor.stop()
    results.put(seen)


def exceptions(count: int) -> list[float]:
    """Return the seconds from a rank's exception to the moment when a peer leaves the collective that it is blocked in."""
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = context.Queue()
    ranks = [context.Process(target=blocked, args=(rank, store.port, count, results)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    seen = [second for _ in ranks for second in results.get()]
    for process in ranks:
        process.join()
    return seen


def deaths(count: int) -> list[float]:
    """Return the seconds from a SIGKILL to the supervisor's message that the rank has died."""
    seen = []
    for _ in range(count):
        started: list[subprocess.Popen[bytes]] = []
        running, said = threading.Event(), []

        def start(rank: int, environment: dict[str, str], started: Any = started, running: Any = running) -> Any:
            started.append(subprocess.Popen(["sleep", "60"], env=environment))
            running.set()
            return started[-1]

        def kill(started: Any = started, running: Any = running, said: Any = said) -> None:
            running.wait()
            time.sleep(0.1)  # by now the supervisor waits
            said.append(time.monotonic())
            os.kill(started[0].pid, signal.SIGKILL)

        threading.Thread(target=kill).start()
        Supervisor(start, 1, RecoveryOptions(max_restarts=0), lambda _, said=said: said.append(time.monotonic())).run()
        seen.append(said[1] - said[0])
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20)
    count = parser.parse_args().count
    raw = {
        "a peer's exception, to a rank that is blocked in a collective": exceptions(count),
        "SIGKILL, to the supervisor": deaths(count),
    }
    rows = [
        [name, spread([1e3 * s for s in seen]), f"{1e3 * max(seen):.3g}", str(len(seen))] for name, seen in raw.items()
    ]
    notes = f"""
Milliseconds; median and middle half. {RANKS} ranks; a rank looks every 20 ms whether its generation is over, and waits for
collectives in slices of 20 ms, so 40 ms is what to expect at most where cores are free.
"""
    write(
        "detection",
        "How soon a fault is known",
        ["fault, and who gets to know", "ms", "worst", "seen"],
        rows,
        notes,
        raw,
    )


if __name__ == "__main__":
    main()
