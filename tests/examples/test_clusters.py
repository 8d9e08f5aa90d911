"""The scripts of examples/clusters start real trainings here, and do the right thing after each exit code."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from lightning_replica.exit_codes import GASP_WRITTEN, GAVE_UP, NO_PROGRESS, NOTHING_SAVED
from tests.examples.clusters import CLUSTERS, HOSTS, Cluster, until
from tests.support import forked_python

TRAINING = Path(__file__).with_name("two_nodes.py")


def supervisors(process: "subprocess.Popen[str]") -> dict[str, psutil.Process]:
    """The processes of `lightning-replica run` below a script, by host."""
    below = psutil.Process(process.pid).children(recursive=True)
    command = [str(Path(sys.executable).with_name("lightning-replica")), "run"]
    return {each.environ()["HOST"]: each for each in below if each.cmdline()[1:3] == command}


def hears(process: psutil.Process, signum: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    (caught,) = re.findall(r"^SigCgt:\s*(\w+)$", status, re.M)
    return bool(int(caught, 16) >> (signum - 1) & 1)


def results(folder: Path) -> list[str]:
    return [(folder / f"rank{rank}").read_text() for rank in range(2)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The oracle: the same ranks on one machine, left alone."""
    folder = tmp_path_factory.mktemp("alone")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    line = [sys.executable, str(TRAINING), str(folder), "1"]
    done = forked_python.run(line, folder, environment, folder / "output", 100)
    assert done.returncode == 0, done.stdout
    found = results(folder)
    assert all(result.startswith("60 ") for result in found)
    return found


# Real trainings

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="a node's ranks end with it on Linux only")


@LINUX
def test_ssh_with_a_lost_node_and_a_last_checkpoint(cluster: Cluster, alone: list[str]) -> None:
    with cluster.started("ssh.sh", str(TRAINING), str(cluster.folder), "2", "20", "40") as process:
        until((cluster.folder / "at20").exists, process, cluster)
        until(lambda: " waits as a spare" in cluster.log, process, cluster)
        nodes = supervisors(process)
        assert sorted(nodes) == HOSTS["ssh.sh"]
        store = {host for host, node in nodes.items() if cluster.port in listening(node)}
        trains = set(re.findall(r"^(\S+): .* has ranks \[\d\]", cluster.log, re.M))
        assert (len(store), len(trains)) == (1, 2), cluster.log
        lost = min(trains - store)
        node = [nodes[lost], *nodes[lost].children()]
        nodes[lost].kill()
        assert not psutil.wait_procs(node, 60)[1]
        (cluster.folder / f"down-{lost}").touch()
        (cluster.folder / "go20").touch()
        until((cluster.folder / "at40").exists, process, cluster)
        nodes[min(store)].terminate()
        (cluster.folder / "go40").touch()
        assert process.wait(150) == 0, cluster.log
    assert cluster.log.count("takes its place (1 of 3)") == 1, cluster.log
    assert cluster.log.count("starts again from there") == 1, cluster.log
    assert len(re.findall(r" has ranks \[\d\]", cluster.log)) == 4, cluster.log
    assert cluster.log.count(" waits as a spare") == 1, cluster.log
    assert results(cluster.folder) == alone, cluster.log


def listening(process: psutil.Process) -> set[int]:
    ask = getattr(process, "net_connections", None) or process.connections  # the latter: before psutil 6
    return {each.laddr.port for each in ask() if each.status == psutil.CONN_LISTEN}


@LINUX
def test_slurm_at_its_time_limit(cluster: Cluster, alone: list[str]) -> None:
    arguments = [str(TRAINING), str(cluster.folder), "2", "20"]
    with cluster.started("slurm.sh", *arguments) as process:
        until((cluster.folder / "at20").exists, process, cluster)
        nodes = supervisors(process)
        assert sorted(nodes) == HOSTS["slurm.sh"]
        until(lambda: all(hears(node, signal.SIGUSR1) for node in nodes.values()), process, cluster)
        for node in nodes.values():  # --signal=USR1 signals all steps
            node.send_signal(signal.SIGUSR1)
        (cluster.folder / "go20").touch()
        assert process.wait(150) == GASP_WRITTEN, cluster.log
    assert cluster.lines("asked") == ["requeue 7"]
    cluster.environment |= {"SLURM_JOB_NODELIST": " ".join(HOSTS["slurm.sh"][:2]), "SPARES": "0"}  # it gets fewer nodes
    assert cluster.run("slurm.sh", *arguments) == 0, cluster.log
    assert cluster.lines("asked") == ["requeue 7"]
    assert results(cluster.folder) == alone, cluster.log


# What scripts do after each exit code

ENDS = [
    (["0", "0", "0"], 0),
    (["0", "killed", "0"], 0),
    (["75", "75", "75"], GASP_WRITTEN),
    (["75", "killed", "75"], GASP_WRITTEN),
    (["75", "93", "75"], NO_PROGRESS),
    (["93", "93", "killed"], NO_PROGRESS),
    (["77", "255", "77"], GAVE_UP),
    (["76", "killed", "76"], NOTHING_SAVED),
    (["2", "2", "2"], 2),
    (["killed", "killed", "killed"], 128 + signal.SIGKILL),
]


@pytest.mark.parametrize(("codes", "code"), ENDS)
def test_ssh_and_exit_codes(codes: list[str], code: int, simulated: Cluster) -> None:
    simulated.will_end("ssh.sh", *(f"{each} 0" for each in codes))
    again = code == GASP_WRITTEN
    assert simulated.run("ssh.sh", "train.py", "--name", "it's a $HOME") == (0 if again else code)
    started = simulated.lines("started")
    assert len(started) == 3 * (1 + again)
    assert sorted({line.split()[0] for line in started}) == HOSTS["ssh.sh"]
    (command,) = {line.partition(" ")[2] for line in started}
    given = f"--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{simulated.port} --rdzv-id "
    assert command.startswith(f"run --nnodes 2 --spares 1 --nproc-per-node 1 {given}")
    assert command.endswith(" train.py --name it's a $HOME")


@pytest.mark.parametrize(("codes", "code"), ENDS)
def test_slurm_and_exit_codes(codes: list[str], code: int, simulated: Cluster) -> None:
    simulated.will_end("slurm.sh", *codes)
    assert simulated.run("slurm.sh", "train.py", "--name", "it's a $HOME") == code
    assert simulated.lines("asked") == (["requeue 7"] if code == GASP_WRITTEN else [])
    given = f"--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{simulated.port} --rdzv-id 7"
    command = f"run --nnodes 2 --spares 1 --nproc-per-node 1 {given} train.py --name it's a $HOME"
    assert sorted(simulated.lines("started")) == [f"{host} {command}" for host in HOSTS["slurm.sh"]]


def test_ssh_leaves_out_a_host_that_is_down(simulated: Cluster) -> None:
    simulated.will_end("ssh.sh", "0", "0", "0")
    down, *others = HOSTS["ssh.sh"]
    (simulated.folder / f"down-{down}").touch()
    assert simulated.run("ssh.sh", "train.py") == 0
    started = simulated.lines("started")
    assert sorted(line.split()[0] for line in started) == others
    assert all(" --nnodes 2 --spares 0 " in line for line in started)


def test_ssh_needs_enough_hosts(simulated: Cluster) -> None:
    for host in HOSTS["ssh.sh"][1:]:
        (simulated.folder / f"down-{host}").touch()
    assert simulated.run("ssh.sh", "train.py") == 1
    assert "1 hosts answer, and 2 are needed" in simulated.log
    assert not simulated.lines("started")


def all_told(cluster: Cluster) -> bool:
    return all((cluster.folder / f"told-{host}").exists() for host in HOSTS["ssh.sh"])


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ssh_that_is_told_to_end(signum: signal.Signals, simulated: Cluster) -> None:
    simulated.will_end("ssh.sh", "waits", "waits", "waits")
    with simulated.started("ssh.sh", "train.py") as process:
        until(lambda: simulated.log.count(": ready") == 3, process, simulated)
        process.send_signal(signum)
        assert process.wait(60) == GASP_WRITTEN
    assert all_told(simulated)
    assert len(simulated.lines("started")) == 3


def test_ssh_that_is_killed_leaves_nothing_behind(simulated: Cluster) -> None:
    simulated.will_end("ssh.sh", "waits", "waits", "waits")
    with simulated.started("ssh.sh", "train.py") as process:
        until(lambda: simulated.log.count(": ready") == 3, process, simulated)
        below = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        gone, alive = psutil.wait_procs(below, 60)
    assert (len(gone), alive) == (len(below), [])
    assert all_told(simulated)


def test_slurm_reads_all_of_our_options() -> None:
    """sbatch reads no further than the first command."""
    lines = (CLUSTERS / "slurm.sh").read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert not [line for line in lines[first:] if "#SBATCH" in line]
    options = {word for line in lines[:first] if line.startswith("#SBATCH") for word in line.split("#")[1].split()[1:]}
    needed = {"--nodes=3", "--ntasks-per-node=1", "--no-kill", "--requeue", "--signal=USR1@120"}
    assert needed <= options


@pytest.mark.parametrize("script", HOSTS)
def test_scripts_have_no_syntax_errors(script: str) -> None:
    subprocess.run(["bash", "-n", str(CLUSTERS / script)], check=True)
    assert os.access(CLUSTERS / script, os.X_OK)
