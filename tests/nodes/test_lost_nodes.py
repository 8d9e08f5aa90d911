"""Nodes, ranks, links and the store are lost: the bits are those of one undisturbed machine, or the end is a known one.

Each run is struck several times, as the machine that was lost comes back as a spare. The whole table is behind the
marker "combinations".
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lightning_replica.exit_codes import GASP_WRITTEN, GAVE_UP
from tests.support.machines import NEEDS_ROOT, Machine, machines
from tests.support.nodes import ENVIRONMENT, Result, Run, Stop, run_alone

pytestmark = NEEDS_ROOT
STEPS = 18
PLACES: tuple[Stop, ...] = ((3, "forward", 2), (6, "before_commit", 2), (9, "update", 2), (12, "validation", 2))
SAVE: Stop = (15, "checkpoint", 2)
Oracle = Callable[[int], Result]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """The oracle: the same number of ranks on one machine."""
    known: dict[int, Result] = {}

    def run(ranks: int) -> Result:
        if ranks not in known:
            out = tmp_path_factory.mktemp("alone")
            run_alone(out, ranks, STEPS)
            known[ranks] = Result.of(out, ranks)
            assert all(result.startswith(f"{STEPS} ") for result in known[ranks].ranks)
            assert len(set(known[ranks].ranks)) == ranks  # each has random numbers and batches of its own
        return known[ranks]

    return run


@contextmanager
def running(
    out: Path,
    nodes: int,
    spares: int,
    stops: tuple[Stop, ...],
    store: str,
    relayed: bool = False,
    options: tuple[str, ...] = (),
) -> Iterator[tuple[Run, list[Machine]]]:
    """A run; its store is served by the first node, or by a machine of its own, the last one."""
    with machines(nodes + spares + (store == "alone"), relayed) as made:
        all_, options = made[: nodes + spares], ("--node-timeout", "6", *options)
        run = Run(out, nodes, 2, STEPS, made[-1 if store == "alone" else 0].address, stops, options, spares=spares)
        if store == "alone":
            command = [sys.executable, "-m", "lightning_replica", "store", f"{made[-1].address}:29500"]
            made[-1].start(command, out / "store", ENVIRONMENT)
        run.start_all(all_)
        yield run, all_


def come_back(run: Run, machine: Machine) -> None:
    """Starts a machine again, which then is a spare."""
    spares = run.text().count("waits as a spare")
    run.start(machine)
    run.says("waits as a spare", spares + 1)


Fault = Callable[[Run, int, int], "Machine | None"]
"""Makes a fault at a stop, where a rank is, and lets the run go on; returns the machine that has ended, if one has."""


def lose_rank(run: Run, number: int, rank: int) -> None:
    run.kill_rank(rank)
    run.go(number)


def lose_supervisor(run: Run, number: int, rank: int) -> Machine:
    machine = run.machine_of(rank)
    machine.supervisor().kill()
    run.started.remove(machine)
    run.go(number)
    return machine


def lose_node(run: Run, number: int, rank: int) -> Machine:
    machine = run.machine_of(rank)
    run.kill(machine)
    run.go(number)
    return machine


def lose_link(run: Run, number: int, rank: int) -> Machine:
    return lose_direction(sends=False, receives=False)(run, number, rank)


def lose_direction(**directions: bool) -> Callable[[Run, int, int], Machine]:
    def lose(run: Run, number: int, rank: int) -> Machine:
        machine = run.machine_of(rank)
        machine.quality(**directions)
        run.started.remove(machine)
        run.go(number)
        assert machine.process is not None
        assert machine.process.wait(60) == GAVE_UP
        assert "has not answered for 4.8 s. The ranks of node" in run.log(machine).read_text()
        machine.quality(**dict.fromkeys(directions, True))
        return machine

    return lose


def blink(run: Run, number: int, rank: int) -> None:
    machine = run.machine_of(rank)
    machine.link("down")
    run.go(number)
    time.sleep(3)  # the fault, which ends by itself
    machine.link("up")


FAULTS: dict[str, Fault] = {
    "rank": lose_rank,
    "supervisor": lose_supervisor,
    "node": lose_node,
    "link down": lose_link,
    "link down for 3 s": blink,
    "sends nothing": lose_direction(sends=False),
    "receives nothing": lose_direction(receives=False),
}


def strike(run: Run, fault: str) -> None:
    """Strikes once at each stop. A machine that has ended comes back as a spare before the next."""
    for number, (_, _, rank) in enumerate(run.stops):
        run.reach(number)
        ended = FAULTS[fault](run, number, rank)
        if ended is not None and number + 1 < len(run.stops):
            come_back(run, ended)


def assert_same(run: Run, oracle: Oracle) -> None:
    assert set(run.codes()) == {0}, run.text()
    assert run.result().ranks == oracle(run.nodes * run.local).ranks, run.text()
    assert run.result().rows == oracle(run.nodes * run.local).rows, run.text()


def of_rank(rank: int, *stops: Stop) -> tuple[Stop, ...]:
    return tuple((step, place, rank) for step, place, _ in stops)


@pytest.mark.parametrize(
    ("fault", "nodes", "store", "stops"),
    [
        ("node", 2, "first", (PLACES[1], SAVE)),
        ("node", 2, "alone", of_rank(0, PLACES[2], PLACES[3])),
        ("link down", 2, "first", (PLACES[0],)),
    ],
)
def test_one_after_the_other(
    fault: str, nodes: int, store: str, stops: tuple[Stop, ...], alone: Oracle, tmp_path: Path
) -> None:
    check(fault, nodes, store, stops, alone, tmp_path)


@pytest.mark.combinations
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("nodes", [2, 3])
@pytest.mark.parametrize(("store", "rank"), [("first", 2), ("alone", 0), ("alone", 3)])
def test_everywhere(fault: str, nodes: int, store: str, rank: int, alone: Oracle, tmp_path: Path) -> None:
    check(fault, nodes, store, of_rank(rank, *PLACES, SAVE), alone, tmp_path)


def check(fault: str, nodes: int, store: str, stops: tuple[Stop, ...], alone: Oracle, tmp_path: Path) -> None:
    with running(tmp_path, nodes, 1, stops, store, relayed="nothing" in fault) as (run, _):
        strike(run, fault)
        assert_same(run, alone)
        replaced = run.text().count("takes its place")
        assert replaced == (0 if fault == "link down for 3 s" else len(stops)), run.text()
        assert (tmp_path / "checkpoints" / "step_00000015").is_dir()


def test_the_node_with_the_store_is_killed(alone: Oracle, tmp_path: Path) -> None:
    with running(tmp_path, 2, 1, ((8, "forward", 2),), "first") as (run, nodes):
        run.reach(0)
        run.kill(nodes[0])
        run.go(0)
        assert run.codes() == [GASP_WRITTEN] * 2, run.text()
        lost = f"The process that served the store at {nodes[0].address}:29500 has ended, and node machine0 is lost."
        assert lost in run.text()
        assert not (tmp_path / "rank2").exists()
    run_alone(tmp_path, 4, STEPS)
    weights = [result.split()[:2] for result in Result.of(tmp_path, 4).ranks]
    assert weights == [result.split()[:2] for result in alone(4).ranks]


def test_a_node_that_is_left_runs_all_ranks_until_another_comes(alone: Oracle, tmp_path: Path) -> None:
    stops = ((4, "forward", 0), (9, "update", 0), (16, "validation", 0))
    with running(tmp_path, 2, 0, stops, "first", options=("--double-up-after", "1")) as (run, nodes):
        run.reach(0)
        run.kill(nodes[1])
        run.go(0)
        run.says("the nodes that are left run its ranks too")
        run.reach(1)
        assert [run.where(rank)[0] for rank in range(4)] == ["machine0"] * 4
        come_back(run, nodes[1])
        run.go(1)
        run.says("takes over ranks [2, 3]", 2)
        run.reach(2)
        assert [run.where(rank)[0] for rank in range(4)] == ["machine0"] * 2 + ["machine1"] * 2
        run.go(2)
        assert_same(run, alone)
