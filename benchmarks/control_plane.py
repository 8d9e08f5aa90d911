"""How the control plane grows: messages of a recovery and its incident, and at rest, by number of nodes.

python benchmarks/control_plane.py

A real store in a process of its own, and the package's own supervisors' and ranks' parts in threads that stand for
nodes. Each node has its own connections to the store of the run. Its own store is in memory.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
# torch asks the DNS for the name of each peer, here thousands at once; an answer that is lost would be waited for.
os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
from common import write

from lightning_replica.control import keys
from lightning_replica.control.faults import Fault
from lightning_replica.control.gathering import Gathering, LocalRanks
from lightning_replica.control.generation import Generations
from lightning_replica.core.grid import Grid
from lightning_replica.nodes.heartbeats import Heartbeats
from lightning_replica.nodes.log import Log
from lightning_replica.nodes.meeting import join
from lightning_replica.nodes.membership import register
from lightning_replica.nodes.node_settings import NodeSettings
from lightning_replica.recovery.account import merged
from lightning_replica.recovery.conclusion import Conclusion, conclude
from lightning_replica.recovery.planner import Mirror, Report
from lightning_replica.stores.address import StoreAddress
from lightning_replica.stores.shared import SharedStore
from lightning_replica.stores.tcp import connect, serve

LOOPBACK, RANKS = "127.0.0.1", 8  # of a node
NODES, MEETING = (125, 1250), (50, 100, 200)
FOREVER = timedelta(days=1)
FAULT = Fault("death", (0,), "Rank 0 was ended by SIGKILL")


class Counting(SharedStore):
    """A connection that counts its messages."""

    def __init__(self, port: int, counts: Counter[str]) -> None:
        super().__init__(StoreAddress(LOOPBACK, port), lambda _: StoreAddress(LOOPBACK, port))
        self._counts = counts

    def _ask(self, question: Any) -> Any:
        self._counts[sys._getframe(1).f_code.co_name] += 1
        return super()._ask(question)

    def set(self, key: str, value: Any) -> None:
        """Give ``key`` a value."""
        self._counts["check"] += 1  # with which `SharedStore` sees that the value has come
        super().set(key, value)


class Plain(Counting):
    """A connection like those of `Heartbeats`, which are no `SharedStore`."""

    def set(self, key: str, value: Any) -> None:
        """Give ``key`` a value."""
        self._ask(lambda store: store.set(key, value))


def report_of(rank: int, grid: Grid) -> Report:
    """Return the report of a rank in the forward pass of a step; rank 0 is new."""
    if rank == 0:
        return Report.of_nothing(0)
    mirrors = tuple(Mirror(peer, kind, 5) for peer in grid.peers(rank) if peer != rank for kind in ("tail", "batch"))
    return Report(rank, 5, True, False, 5, (1.0,), (5,), (5,), mirrors)


def account_of(rank: int) -> dict[str, Any]:
    """Return the account of a rank, as `recovery.account` has it."""
    phases = dict.fromkeys(("stop", "clean", "regroup", "repair", "rollback", "resume"), 0.123456)
    own = {"reporter": rank, "time": "2026-01-01T00:00:00.000+00:00", "recovery_s": 1.0, "phases": phases}
    return {
        **own,
        "batches": 1,
        "seconds": 0.5,
        "base": 0,
        "starts": [[rank, 0]],
        "reported": 0,
        "moves": [],
        "inexact": {},
    }


class SimulatedNode:
    """A node: its store, its supervisor's log, and its ranks, which one thread plays one after the other."""

    def __init__(self, number: int, port: int, grid: Grid, counts: Counter[str]) -> None:
        self._ranks, self._grid = range(number * RANKS, (number + 1) * RANKS), grid
        self.near: Any = dist.HashStore()
        self.near.set_timeout(FOREVER)
        run = Counting(port, counts)
        node = LocalRanks(self.near, RANKS, lambda: (Counting(port, counts), self.near))
        self._generations = Generations(run, 0, Gathering(run, node))
        self._log = Log(lambda: Counting(port, counts), lambda: self.near, lambda *_: None)
        self._log.follow()

    def recover(self, generation: int) -> float:
        """Wait until a generation begins, and take part in it. Return when this node has read the plan."""
        topic, everyone, gathering = keys.report(generation), range(self._grid.size), self._generations.gathering
        reports = {rank: report_of(rank, self._grid).to_plain() for rank in self._ranks}
        self.near.get(keys.generation(generation))
        for rank, report in reports.items():
            self._generations.begin(generation, FAULT)
            gathering.give(topic, rank, report, everyone, self._conclude)
        plan = Conclusion.from_plain(gathering.result(topic)).plan
        if [move.target for move in plan.moves] != [0]:
            raise RuntimeError(f"a wrong plan: {plan}")
        return time.monotonic()

    def report(self, generation: int) -> None:
        """Have all ranks give their accounts of the incident, and read what follows from those of all."""
        topic, everyone, gathering = keys.account(generation), range(self._grid.size), self._generations.gathering
        for rank in self._ranks:
            gathering.give(topic, rank, account_of(rank), everyone, merged)
        for _ in self._ranks:
            gathering.result(topic)
            self._generations.store.check([keys.inexact_count(generation)])

    def _conclude(self, parts: list[dict[str, Any]]) -> Any:
        if self._generations.store.check([keys.VERDICT]):
            raise RuntimeError("the run is given up")
        return conclude([Report.from_plain(part) for part in parts], self._grid, 3, "").to_plain()


def played(nodes: list[SimulatedNode], play: Callable[[SimulatedNode], Any]) -> list[Any]:
    """Let all nodes of this process play; return what came of it."""
    ends: list[Any] = []
    threads = [threading.Thread(target=lambda node=node: ends.append(play(node))) for node in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends


def recoveries(pipe: Any, numbers: range, port: int, size: int) -> None:
    """Play some nodes: whenever told to, through one recovery."""
    counts: Counter[str] = Counter()
    grid = Grid.of(size, 2)
    nodes = [SimulatedNode(number, port, grid, counts) for number in numbers]
    pipe.send("ready")
    while True:
        generation = pipe.recv()
        counts.clear()
        ends = played(nodes, lambda node: node.recover(generation))  # noqa: B023
        recovering = Counter(counts)
        counts.clear()
        played(nodes, lambda node: node.report(generation))  # noqa: B023
        pipe.send((ends, recovering, Counter(counts)))


class Nobody:
    """Hears what `Heartbeats` finds."""

    def __init__(self, first: int) -> None:
        self._first = first

    def trains(self) -> frozenset[int]:
        """Return the nodes with ranks."""
        return frozenset(range(self._first))

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def rest(pipe: Any, numbers: range, port: int, size: int) -> None:
    """Play some nodes at rest; when told to, count messages for some seconds."""
    counts: Counter[str] = Counter()
    settings = NodeSettings(size, 1, StoreAddress(LOOPBACK, port), "run", LOOPBACK)
    store = connect(LOOPBACK, port)
    nodes = []
    for _ in numbers:
        own = register(store, LOOPBACK, port, "node")
        nodes.append(Heartbeats(settings, own, lambda: Plain(port, counts), Nobody(size)))
    pipe.send("ready")
    seconds = pipe.recv()
    for heartbeats in nodes:
        heartbeats.start()
    time.sleep(3 * settings.node_timeout_s)  # all know each other
    counts.clear()
    time.sleep(seconds)
    pipe.send(dict(counts))


def rendezvous(pipe: Any, numbers: range, port: int, size: int) -> None:
    """Play some nodes that meet when told to."""
    counts: Counter[str] = Counter()
    settings = NodeSettings(size, 1, StoreAddress(LOOPBACK, port), "run", LOOPBACK)
    ends: list[float] = []

    def come() -> None:
        store: Any = Counting(port, counts)
        join(store, register(store, LOOPBACK, port, "node"), settings)
        ends.append(time.monotonic())

    threads = [threading.Thread(target=come) for _ in numbers]
    pipe.send("ready")
    pipe.recv()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pipe.send((ends, dict(counts)))


def _serve(pipe: Any) -> None:
    store = serve(LOOPBACK)
    pipe.send(store.port)
    pipe.recv()


class Players:
    """A store, and processes that play nodes.

    Args:
        play: What the processes do.
        nodes: Number of nodes.
        size: Passed to ``play``.
    """

    def __init__(self, play: Any, nodes: int, size: int) -> None:
        processes = max(2, nodes // 50)  # threads of one process wait for its interpreter, which nodes would not
        context = multiprocessing.get_context("fork")
        self._server, server = context.Pipe()
        self._processes = [context.Process(target=_serve, args=(server,))]
        self._processes[0].start()
        self.port = self._server.recv()
        self.pipes = []
        for first in range(processes):
            mine = range(first * nodes // processes, (first + 1) * nodes // processes)
            ours, theirs = context.Pipe()
            process = context.Process(target=play, args=(theirs, mine, self.port, size))
            process.start()
            self._processes.append(process)
            self.pipes.append(ours)
        for pipe in self.pipes:
            pipe.recv()

    def __enter__(self) -> "Players":
        """Return these players."""
        return self

    def __exit__(self, *_: object) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
            process.join()

    def tell(self, what: Any) -> None:
        """Tell all players something."""
        for pipe in self.pipes:
            pipe.send(what)

    def hear(self) -> list[Any]:
        """Return what each player says."""
        return [pipe.recv() for pipe in self.pipes]


def measure_recoveries(nodes: int, repeats: int) -> tuple[list[float], Counter[str], Counter[str]]:
    """Return the seconds from a fault to the plan, and the messages of the last recovery and of its incident."""
    taken, counts, of_incident = [], Counter[str](), Counter[str]()
    with Players(recoveries, nodes, nodes * RANKS) as players:
        generations = Generations(connect(LOOPBACK, players.port))
        for generation in range(1, repeats + 2):
            players.tell(generation)
            time.sleep(2.0)  # all wait
            began = time.monotonic()
            generations.begin(generation, replace(FAULT, text=f"{FAULT.text} ({generation})"))
            heard = players.hear()
            taken.append(max(end for ends, _, _ in heard for end in ends) - began)
            counts = sum((each for _, each, _ in heard), Counter[str]())
            of_incident = sum((each for _, _, each in heard), Counter[str]())
    return taken[1:], counts, of_incident  # the first opens connections


def measure_rest(nodes: int, seconds: float) -> Counter[str]:
    """Return the messages of all nodes at rest."""
    with Players(rest, nodes, nodes) as players:
        players.tell(seconds)
        return sum((Counter(each) for each in players.hear()), Counter[str]())


def measure_rendezvous(nodes: int) -> tuple[float, Counter[str]]:
    """Return the seconds until all nodes know their place, and their messages."""
    with Players(rendezvous, nodes, nodes) as players:
        began = time.monotonic()
        players.tell("begin")
        heard = players.hear()
        ends = [end for each, _ in heard for end in each]
        return max(ends) - began, sum((Counter(each) for _, each in heard), Counter[str]())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="*", default=NODES)
    parser.add_argument("--meeting", type=int, nargs="*", default=MEETING)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    rows: list[list[str]] = []
    raw: dict[str, Any] = {}
    for nodes in options.nodes:
        taken, counts, of_incident = measure_recoveries(nodes, options.repeats)
        resting = measure_rest(nodes, options.seconds)
        at_rest = sum(resting.values()) / nodes / options.seconds
        rows.append(
            [
                str(nodes),
                str(nodes * RANKS),
                f"{statistics.median(taken):.2f} ({min(taken):.2f} .. {max(taken):.2f})",
                f"{sum(counts.values())} ({sum(counts.values()) / nodes:.1f})",
                f"{sum(of_incident.values())} ({sum(of_incident.values()) / nodes:.1f})",
                f"{at_rest:.2f}",
            ]
        )
        raw[str(nodes)] = {"seconds": taken, "messages": counts, "incident": of_incident, "at rest": resting}
        sys.stdout.write(f"{rows[-1]} {dict(counts)} {dict(of_incident)} {dict(resting)}\n")
    meetings = []
    for nodes in options.meeting:
        seconds, counts = measure_rendezvous(nodes)
        meetings.append(f"| {nodes} | {seconds:.1f} | {sum(counts.values())} |")
        raw[f"rendezvous {nodes}"] = {"seconds": seconds, "messages": counts}
        sys.stdout.write(f"{meetings[-1]} {dict(counts)}\n")
    table = "\n".join(meetings)
    notes = f"""
From the entry in the log that says that a rank has died until every node has the plan: all nodes hear of it, all ranks
report, one makes the plan, all nodes read it. Median (least .. most) of {options.repeats}. Messages go to the store of
the run; a message at rest is a heartbeat, or a request for others'. All nodes share the cores of this machine,
which is the slower way: in a cluster, they work at the same time. An incident: all ranks give their accounts, one puts
them together, all ranks read that.

Nodes that come at the same time, until all know their place:

| nodes | seconds | messages |
|---|---|---|
{table}
"""
    header = [
        "nodes",
        "ranks",
        "seconds from fault to plan",
        "messages (of a node)",
        "of the incident (of a node)",
        "messages of a node and second at rest",
    ]
    write("control_plane", "The control plane", header, rows, notes, raw)


if __name__ == "__main__":
    main()
