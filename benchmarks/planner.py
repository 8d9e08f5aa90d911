"""How long it takes to make one plan, by number of ranks.

python benchmarks/planner.py
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from common import spread, write

from lightning_replica.core.grid import Grid
from lightning_replica.recovery.planner import Mirror, Report, make_plan

WORLDS = (1_000, 10_000, 100_000)


def reports(grid: Grid, lost: range) -> list[Report]:
    """Return the reports of ranks that are all in the forward pass of a step, except for ``lost``, which are new."""
    found = []
    for rank in range(grid.size):
        if rank in lost:
            found.append(Report(rank, -1, False, False, -1, (), (), ()))
            continue
        mirrors = tuple(
            Mirror(peer, kind, 5) for peer in grid.peers(rank) if peer != rank for kind in ("tail", "batch")
        )
        found.append(Report(rank, 5, True, False, 5, (1.0,), (5,), (5,), mirrors))
    return found


def measure(grid: Grid, lost: range, repeats: int) -> list[float]:
    given = reports(grid, lost)
    taken = []
    for _ in range(repeats):
        began = time.thread_time()
        make_plan(given, grid, 3)
        taken.append(time.thread_time() - began)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    rows, raw = [], {}
    for world_size in WORLDS:
        for replicas in (2, 4):
            grid = Grid.of(world_size, replicas)
            for name, lost in (
                ("one", range(1)),
                ("a hundredth", range(world_size // 100)),
                ("half", range(world_size // 2)),
            ):
                taken = measure(grid, lost, repeats)
                rows.append([str(world_size), str(replicas), name, spread(taken)])
                raw[f"{world_size} {replicas} {name}"] = taken
    notes = f"""
Seconds of CPU time for one `make_plan`; median and middle half of {repeats}. Every rank makes the same plan by itself.
"""
    write("planner", "The planner", ["ranks", "replicas", "lost", "seconds"], rows, notes, raw)


if __name__ == "__main__":
    main()
