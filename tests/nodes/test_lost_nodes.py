"""Nodes, ranks, links and the store are lost: the bits are those of one undisturbed machine, or the end is a known one.

Each run is struck several times, as the machine that was lost comes back as a spare. The whole table is behind the
marker "combinations".
"""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_replica.exit_codes import GASP_WRITTEN, GAVE_UP, NOTHING_SAVED
from tests.support.etcd import NEEDS_ETCD
from tests.support.machines import NEEDS_ROOT, Machine, machines
from tests.support.nodes import SERVE, Result, Run, Stop, run_untouched, start_store

pytestmark = NEEDS_ROOT
STEPS = 18
STRANGER = Path(__file__).with_name("stranger.py")
PLACES: tuple[Stop, ...] = ((3, "forward", 2), (6, "before_commit", 2), (9, "update", 2), (12, "validation", 2))
SAVE: Stop = (15, "checkpoint", 2)
LOCAL = 2  # ranks on a node
Oracle = Callable[[int], Result]


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """The oracle: a run without a fault on as many nodes."""
    known: dict[int, Result] = {}

    def run(nodes: int) -> Result:
        ranks = nodes * LOCAL
        if nodes not in known:
            out = tmp_path_factory.mktemp("untouched")
            run_untouched(out, nodes, LOCAL, STEPS)
            known[nodes] = Result.of(out, ranks)
            assert all(result.startswith(f"{STEPS} ") for result in known[nodes].ranks)
            assert len(set(known[nodes].ranks)) == ranks  # each has random numbers and batches of its own
        return known[nodes]

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
    prepare: Callable[[list[Machine]], None] = lambda made: None,
    **environment: str,
) -> Iterator[tuple[Run, list[Machine]]]:
    """A run, and all its machines: those that train come first, then spares, then those that serve the store."""
    count = nodes + spares
    with machines(count + SERVE[store], relayed) as made:
        prepare(made)
        endpoint = start_store(store, made, out)
        all_options = ("--node-timeout", "6", *options)
        run = Run(out, nodes, 2, STEPS, endpoint, stops, all_options, environment, spares=spares)
        run.start_all(made[:count])
        yield run, made


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
        assert "has not answered for 5.4 s. The ranks of node" in run.log(machine).read_text()
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
    assert run.result().ranks == oracle(run.nodes).ranks, run.text()
    assert run.result().rows == oracle(run.nodes).rows, run.text()


def of_rank(rank: int, *stops: Stop) -> tuple[Stop, ...]:
    return tuple((step, place, rank) for step, place, _ in stops)


@pytest.mark.parametrize(
    ("fault", "nodes", "store", "stops"),
    [
        ("node", 2, "first", (PLACES[1], SAVE)),
        pytest.param("node", 2, "alone", of_rank(0, PLACES[2], PLACES[3]), marks=pytest.mark.combinations),
        pytest.param("link down", 2, "first", (PLACES[0],), marks=pytest.mark.combinations),
        pytest.param("link down", 2, "alone", ((7, "logger", 0),), marks=pytest.mark.combinations),
    ],
)
def test_one_after_the_other(
    fault: str, nodes: int, store: str, stops: tuple[Stop, ...], untouched: Oracle, tmp_path: Path
) -> None:
    check(fault, nodes, store, stops, untouched, tmp_path)


@pytest.mark.combinations
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("nodes", [2, 3])
@pytest.mark.parametrize(
    ("store", "rank"), [("first", 2), ("alone", 0), ("alone", 3), pytest.param("etcd", 0, marks=NEEDS_ETCD)]
)
def test_everywhere(fault: str, nodes: int, store: str, rank: int, untouched: Oracle, tmp_path: Path) -> None:
    check(fault, nodes, store, of_rank(rank, *PLACES, SAVE), untouched, tmp_path)


def check(fault: str, nodes: int, store: str, stops: tuple[Stop, ...], untouched: Oracle, tmp_path: Path) -> None:
    blinks = fault == "link down for 3 s"
    patience = ("--node-timeout", "10") if blinks else ()
    pause_s = "1" if blinks else "0"  # with faster steps, five blips of 3 s are one of 15 s
    with running(tmp_path, nodes, 1, stops, store, "nothing" in fault, patience, PAUSE_S=pause_s) as (run, _):
        strike(run, fault)
        assert_same(run, untouched)
        replaced = run.text().count("takes its place")
        assert replaced == (0 if blinks else len(stops)), run.text()
        assert (tmp_path / "checkpoints" / "step_00000015").is_dir()


def test_the_node_with_the_store_is_killed(untouched: Oracle, tmp_path: Path) -> None:
    with running(tmp_path, 2, 1, ((8, "forward", 2),), "first") as (run, nodes):
        run.reach(0)
        run.kill(nodes[0])
        run.go(0)
        assert run.codes() == [GASP_WRITTEN] * 2, run.text()
        lost = f"The process that served the store at {nodes[0].address}:29500 has ended, and node machine0 is lost."
        assert lost in run.text()
        assert not (tmp_path / "rank2").exists()
    run_untouched(tmp_path, 2, LOCAL, STEPS)
    weights = [result.split()[:2] for result in Result.of(tmp_path, 4).ranks]
    assert weights == [result.split()[:2] for result in untouched(2).ranks]


@pytest.mark.combinations
def test_a_node_that_is_left_runs_all_ranks_until_another_comes(untouched: Oracle, tmp_path: Path) -> None:
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
        assert_same(run, untouched)


@NEEDS_ETCD
def test_two_nodes_and_a_member_of_etcd_are_lost(untouched: Oracle, tmp_path: Path) -> None:
    """With etcd nothing is lost with a machine of the store, also while a node is lost."""
    with running(tmp_path, 2, 1, ((5, "update", 0), (11, "forward", 3)), "etcd") as (run, all_):
        run.reach(0)
        all_[-1].kill()
        come_back(run, lose_node(run, 0, 0))
        run.reach(1)
        lose_node(run, 1, 3)
        assert_same(run, untouched)


def forget_idle_connections(made: list[Machine]) -> None:
    """A firewall at the second machine, which forgets connections that were idle for some seconds."""
    inside = ["ip", "netns", "exec", made[1].namespace]
    for name, value in (("timeout_established", 6), ("loose", 0)):
        setting = f"net.netfilter.nf_conntrack_tcp_{name}={value}"
        subprocess.run([*inside, "sysctl", "-w", setting], check=True, capture_output=True)
    rules = """
    table inet firewall {
        chain sent { type filter hook output priority 0; tcp dport 29500 ct state invalid drop; }
        chain received { type filter hook input priority 0; tcp sport 29500 ct state invalid drop; }
    }
    """
    subprocess.run([*inside, "nft", "-f", "-"], input=rules.encode(), check=True)


@pytest.mark.combinations
@pytest.mark.skipif(shutil.which("nft") is None, reason="needs nftables")
def test_a_firewall_forgets_idle_connections(untouched: Oracle, tmp_path: Path) -> None:
    """All other connections of the node to the store pass, and training goes on, until there is a fault."""
    stops = ((5, "forward", 0),)
    with running(tmp_path, 2, 0, stops, "first", prepare=forget_idle_connections) as (run, nodes):
        run.reach(0)
        time.sleep(12)  # the fault
        assert run.machine_of(0) is nodes[0]
        lose_rank(run, 0, 0)
        assert_same(run, untouched)


@pytest.mark.combinations
def test_a_node_is_lost_while_another_is_replaced(untouched: Oracle, tmp_path: Path) -> None:
    """With three holders of each shard, on three nodes."""
    stops = ((5, "before_commit", 2), (5, "rollback", 0))
    with running(tmp_path, 3, 2, stops, "alone", REPLICAS="3") as (run, nodes):
        run.reach(0)
        run.kill(nodes[1])
        run.go(0)
        run.reach(1)  # in the recovery
        run.kill(run.machine_of(4))
        run.go(1)
        assert_same(run, untouched)
        assert run.text().count("takes its place") == 2, run.text()


@pytest.mark.combinations
def test_a_spare_is_lost_while_it_waits_and_one_while_it_takes_over(untouched: Oracle, tmp_path: Path) -> None:
    with running(tmp_path, 2, 3, ((5, "forward", 2), (5, "rollback", 0)), "alone") as (run, nodes):
        run.reach(0)
        run.kill(nodes[4])
        run.kill(nodes[1])
        run.go(0)
        run.reach(1)
        first = takes_place(run)
        run.kill(first[0])
        run.go(1)
        assert_same(run, untouched)
        assert {each.name for each in takes_place(run)} == {nodes[2].name, nodes[3].name}


def takes_place(run: Run) -> list[Machine]:
    """The machines that took the places of others."""
    return [run.named(name) for name in re.findall(r"node (machine\d) takes its place", run.text())]


@pytest.mark.combinations
def test_all_holders_of_a_shard_are_lost(tmp_path: Path) -> None:
    """Two of three nodes at once: nobody could go on, and nobody could save. The end is told, and nobody hangs."""
    with running(tmp_path, 3, 2, ((5, "forward", 0),), "alone") as (run, nodes):
        run.reach(0)
        run.kill(nodes[1])
        run.kill(nodes[2])
        run.go(0)
        codes = run.codes()
        assert set(codes) == {NOTHING_SAVED}, (codes, run.text())
        assert "Every holder of shard 2 is lost" in run.text()


@pytest.mark.combinations
def test_a_slow_link_that_loses_frames_raises_no_alarm(untouched: Oracle, tmp_path: Path) -> None:
    """200 ms there and back, and one frame in twenty is lost each way; then nothing passes for five seconds."""
    stops = ((2, "forward", 2), (4, "forward", 2))
    options = ("--node-timeout", "10")
    with running(tmp_path, 2, 1, stops, "alone", relayed=True, options=options) as (run, nodes):
        run.reach(0)
        nodes[1].quality(delay_s=0.1, loss=0.05)
        run.go(0)
        run.reach(1)
        nodes[1].link("down")
        time.sleep(5)  # the fault, which ends by itself
        nodes[1].link("up")
        nodes[1].quality(delay_s=0.0, loss=0.0)
        run.go(1)
        assert_same(run, untouched)
        assert "lost" not in run.text()


@pytest.mark.combinations
@pytest.mark.skipif(not hasattr(dist.TCPStore, "list_keys"), reason="the stranger asks for all keys")
def test_a_stranger_writes_to_the_store(untouched: Oracle, tmp_path: Path) -> None:
    """With a secret, whatever it writes under whichever key; and a node is lost meanwhile."""
    with running(tmp_path, 2, 1, ((6, "update", 2),), "alone", LIGHTNING_REPLICA_SECRET="one that only nodes know") as (
        run,
        nodes,
    ):
        log = tmp_path / "stranger"
        nodes[-1].also([sys.executable, str(STRANGER), nodes[-1].address, "29500"], log)
        run.reach(0)
        run.until(lambda: log.read_text().count("round") > 5)
        run.kill(nodes[1])
        run.go(0)
        assert_same(run, untouched)
        assert "in the store is ignored, as its tag is not valid" in run.text()


@pytest.mark.combinations
def test_clocks_differ(untouched: Oracle, tmp_path: Path) -> None:
    """By months: a node compares only times of its own clock."""
    with running(tmp_path, 2, 0, ((6, "update", 2),), "alone") as (run, nodes):
        run.reach(0)
        machine = lose_node(run, 0, 2)
        run.start(machine, clock_s=10_000_000)
        assert_same(run, untouched)


@pytest.mark.combinations
def test_a_rank_that_hangs_is_named_with_its_node(untouched: Oracle, tmp_path: Path) -> None:
    with running(tmp_path, 2, 0, ((10, "forward", 2),), "alone", HANG_S="2") as (run, _):
        run.reach(0)
        run.process_of(2).suspend()
        run.go(0)
        assert_same(run, untouched)
        assert "Rank 2 on node machine1 hangs in forward (no progress for" in run.text()


@pytest.mark.combinations
def test_ranks_of_all_nodes_wait_for_each_other(untouched: Oracle, tmp_path: Path) -> None:
    """One has left out a collective that the others have called. All are called back, and try again."""
    with running(tmp_path, 2, 0, (), "alone", HANG_S="2", SKIP="8") as (run, _):
        assert_same(run, untouched)
        assert "All ranks on node machine0 wait for others, and nothing has moved for" in run.text()
        assert "All ranks on node machine1 wait for others, and nothing has moved for" in run.text()
        assert "hang: all ranks wait for each other" in run.text()
