"""What examples/clusters has: the scripts start real trainings here, and the manifests say what Kubernetes reads."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest
import yaml

from lightning_replica.cli import run as run_command
from lightning_replica.exit_codes import GASP_WRITTEN, GAVE_UP, NO_PROGRESS, NOTHING_SAVED
from tests.support import forked_python

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"
TRAINING = Path(__file__).with_name("two_nodes.py")
SCHEMAS = yaml.safe_load(Path(__file__).with_name("schemas").joinpath("kubernetes.yaml").read_text())
# All are this machine. The store's address has no user; with ssh each host comes to serve it when others are lost.
HOSTS = {"ssh.sh": [f"user{number}@127.0.0.1" for number in range(3)], "slurm.sh": ["127.0.0.1", "node1", "node2"]}

# What the scripts find on the PATH. All keep what the test reads in $STAND_IN.
STAND_INS = {
    # As sshd does, it gives the command to a shell.
    "ssh": """
        while true; do case $1 in -o) shift 2 ;; -*) shift ;; *) break ;; esac; done
        HOST=$1; export HOST; shift
        [ ! -e "$STAND_IN/down-$HOST" ] || exit 255
        exec sh -c "$*"
    """,
    "srun": """
        while true; do case $1 in --nodelist=*) HOST=${1#*=}; export HOST ;; --*) ;; *) break ;; esac; shift; done
        exec "$@"
    """,
    "scontrol": """
        case $1 in hostnames | show) printf '%s\\n' $SLURM_JOB_NODELIST ;; *) echo "$*" >>"$STAND_IN/asked" ;; esac
    """,
}
# Ends with the next of the codes that the test has written for this host.
STAND_IN_RUN = """
    echo "$HOST $*" >>"$STAND_IN/started"
    read -r code later <"$STAND_IN/codes-$HOST"
    echo "$later" >"$STAND_IN/codes-$HOST"
    case $code in
        killed) kill -9 $$ ;;
        waits) trap 'touch "$STAND_IN/told-$HOST"; exit 75' TERM; echo ready; while true; do sleep 0.02; done ;;
    esac
    exit "$code"
"""


class Cluster:
    """One machine that the scripts take for several."""

    def __init__(self, folder: Path, stand_ins: dict[str, str]) -> None:
        self.folder, commands = folder, folder / "bin"
        commands.mkdir()
        for name, script in stand_ins.items():
            (commands / name).write_text(f"#!/bin/sh\n{script}")
            (commands / name).chmod(0o755)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        here = [str(commands), str(Path(sys.executable).parent), os.environ["PATH"]]
        slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": " ".join(HOSTS["slurm.sh"])}
        own = {"PATH": os.pathsep.join(here), "STAND_IN": str(folder), "PORT": str(self.port)}
        python = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONWARNINGS": "ignore"}
        self.environment = {**os.environ, **slurm, **python, **own}

    def started(self, script: str, *arguments: str) -> AbstractContextManager["subprocess.Popen[str]"]:
        """A script of examples/clusters."""
        hosts = [" ".join(HOSTS[script])] if script == "ssh.sh" else []
        return self._process([str(CLUSTERS / script), *hosts, *arguments])

    def pod(self, pods: dict[str, Any]) -> AbstractContextManager["subprocess.Popen[str]"]:
        """What the container of a pod runs."""
        only = container(pods)
        self.environment |= {"HOST": HOSTS["slurm.sh"][0], "POD_IP": "10.0.0.7"}
        return self._process([*only["command"], *only.get("args", [])])

    @contextmanager
    def _process(self, line: list[str]) -> Iterator["subprocess.Popen[str]"]:
        """A process that runs, and all of whose processes end with this block."""
        with (self.folder / "log").open("a") as log:
            out = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
            process = subprocess.Popen(line, cwd=self.folder, env=self.environment, text=True, **out)
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):  # nothing is left of it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def run(self, script: str, *arguments: str) -> int:
        """Runs a script to its end, and returns its exit code."""
        with self.started(script, *arguments) as process:
            return process.wait(150)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def will_end(self, script: str, *codes: str) -> None:
        """Writes down with which codes the hosts of a script end, one for each time that the job is started."""
        for host, of_host in zip(HOSTS[script], codes, strict=True):
            (self.folder / f"codes-{host}").write_text(f"{of_host}\n")


@pytest.fixture
def simulated(tmp_path: Path) -> Cluster:
    """A cluster on which nothing trains."""
    return Cluster(tmp_path, {**STAND_INS, "lightning-replica": STAND_IN_RUN})


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """A cluster on which the real `lightning-replica` runs."""
    return Cluster(tmp_path, STAND_INS)


def until(ready: Callable[[], bool], process: "subprocess.Popen[str]", cluster: Cluster) -> None:
    while not ready():
        assert process.poll() is None, cluster.log
        time.sleep(0.01)


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
    return {each.laddr.port for each in process.net_connections() if each.status == psutil.CONN_LISTEN}


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


# Manifests

Manifest = dict[str, Any]


def manifests(name: str) -> list[Manifest]:
    return list(yaml.safe_load_all((CLUSTERS / "kubernetes" / name).read_text()))


def check(manifest: Manifest) -> None:
    """Raises an error if Kubernetes would not read a manifest."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$ref": f"#/$defs/{manifest['kind']}",
        **SCHEMAS,
    }
    jsonschema.validate(manifest, schema)


def job(name: str) -> Manifest:
    """The specification of a job of the JobSet."""
    (jobset,) = manifests("jobset.yaml")
    return next(each["template"]["spec"] for each in jobset["spec"]["replicatedJobs"] if each["name"] == name)


def container(pods: Manifest) -> Manifest:
    """The only container of a pod."""
    (found,) = pods["template"]["spec"]["containers"]
    return dict(found)


def workers() -> Manifest:
    return dict(manifests("pytorchjob.yaml")[0]["spec"]["pytorchReplicaSpecs"]["Worker"])


@pytest.mark.parametrize("name", ["jobset.yaml", "pytorchjob.yaml"])
def test_manifests(name: str) -> None:
    for manifest in manifests(name):
        check(manifest)


def test_schemas_are_schemas() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMAS)


def edit(manifest: Manifest, path: str, value: object) -> None:
    """Sets what is at a path; None removes it."""
    *above, last = (int(part) if part.isdigit() else part for part in path.split("."))
    at: Any = manifest
    for part in above:
        at = at[part]
    if value is None:
        del at[last]
    else:
        at[last] = value


NODES = "spec.replicatedJobs.1.template"
WORKER = "spec.pytorchReplicaSpecs.Worker"


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("jobset.yaml", f"{NODES}.podFailurePolicy", {"rules": []}),  # belongs into "spec" beside it
        ("jobset.yaml", f"{NODES}.spec.template.spec.restartPolicy", "OnFailure"),
        ("jobset.yaml", f"{NODES}.spec.podFailurePolicy.rules.0.onExitCodes.operator", "in"),
        ("jobset.yaml", f"{NODES}.spec.podFailurePolicy.rules.0.onExitCodes.values", ["93"]),
        ("jobset.yaml", f"{NODES}.spec.podFailurePolicy.rules.0.action", "Fail"),
        ("jobset.yaml", f"{NODES}.spec.podFailurePolicy.rules.2.onPodConditions.0.status", None),
        ("jobset.yaml", f"{NODES}.spec.podFailurePolicy.rules.2.onPodConditions.0.status", True),
        ("jobset.yaml", f"{NODES}.spec.completions", None),
        ("jobset.yaml", f"{NODES}.spec.completionmode", "Indexed"),
        ("jobset.yaml", "spec.replicatedJobs.1.dependsOn.0.status", "Running"),
        ("jobset.yaml", "spec.failurePolicy.rules.0.action", "FailJob"),
        ("jobset.yaml", f"{NODES}.spec.template.spec.containers.0.image", None),
        ("pytorchjob.yaml", f"{WORKER}.restartPolicy", "OnExitCode"),
        ("pytorchjob.yaml", f"{WORKER}.template.spec.restartPolicy", "Never"),
        ("pytorchjob.yaml", f"{WORKER}.template.spec.containers.0.name", "node"),
        ("pytorchjob.yaml", f"{WORKER}.template.spec.containers.0.command.0", 1),
        ("pytorchjob.yaml", f"{WORKER}.template.spec.containers.0.resources.requests.cpu", 8),
        ("pytorchjob.yaml", "spec.pytorchReplicaSpecs.Spare", {}),
        ("pytorchjob.yaml", "spec.elasticPolicy.minReplicas", "2"),
        ("pytorchjob.yaml", "apiVersion", "kubeflow.org/v2"),
    ],
)
def test_mistakes_in_manifests(name: str, path: str, value: object) -> None:
    manifest = manifests(name)[0]
    edit(manifest, path, value)
    with pytest.raises(jsonschema.ValidationError):
        check(manifest)


def test_pods_and_exit_codes() -> None:
    nodes = job("nodes")
    name = container(nodes)["name"]
    codes = [(rule["action"], rule.get("onExitCodes")) for rule in nodes["podFailurePolicy"]["rules"]]
    rules = [(action, on["operator"], on["values"], on["containerName"]) for action, on in codes if on]
    assert rules == [("FailJob", "In", [NO_PROGRESS], name), ("Ignore", "In", [GASP_WRITTEN], name)]
    (jobset,) = manifests("jobset.yaml")
    (rule,) = jobset["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])


# What the operator sets, as for torchrun, with and without an elasticPolicy.
PET = {
    "PET_NNODES": "2:3",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "train-master-0",
    "PET_MASTER_PORT": "23456",
    "PET_RDZV_BACKEND": "c10d",
    "PET_RDZV_ENDPOINT": "train-worker-0:23456",
    "PET_MAX_RESTARTS": "10",
}


@pytest.mark.parametrize("name", ["jobset.yaml", "pytorchjob.yaml"])
def test_what_nodes_are_started_with(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in PET.items():
        monkeypatch.setenv(variable, value)
    pods = job("nodes") if name == "jobset.yaml" else workers()
    options = container(pods).get("args") or container(pods)["command"][2:]
    given = run_command.parser().parse_args(["--local-addr=127.0.0.1", *options])
    settings = run_command.settings_of(given)
    assert (settings.nnodes, settings.spares, settings.nproc_per_node) == (2, 1, 1)
    if name == "jobset.yaml":
        (jobset,) = manifests(name)
        train, port = jobset["metadata"]["name"], container(job("store"))["startupProbe"]["tcpSocket"]["port"]
        assert given.rdzv_endpoint == f"{train}-store-0-0.{train}:{port}"  # the host name that JobSet gives to a pod
        assert pods["completions"] == pods["parallelism"] == settings.nnodes + settings.spares
    else:
        deployment, service = (each["spec"] for each in manifests(name)[1:])
        (port,) = (each["port"] for each in service["ports"])
        assert given.rdzv_endpoint == f"{manifests(name)[2]['metadata']['name']}:{port}"
        labels = deployment["template"]["metadata"]["labels"]
        assert service["selector"] == deployment["selector"]["matchLabels"] == labels
        assert pods["replicas"] == settings.nnodes + settings.spares


@pytest.mark.parametrize(
    ("ends", "code"),
    [("0", 0), ("93", 93), ("2", 2), ("75", 203), ("77", 205), ("1", 129), ("137", 137), ("killed", 137)],
)
def test_a_worker_and_its_exit_codes(ends: str, code: int, simulated: Cluster) -> None:
    """The operator starts a pod again after a code of 128 and more, and else fails the job."""
    simulated.will_end("slurm.sh", ends, "", "")
    with simulated.pod(workers()) as process:
        assert process.wait(60) == code
    (started,) = simulated.lines("started")
    assert started == " ".join([HOSTS["slurm.sh"][0], "run", *container(workers())["args"]])


def test_a_worker_that_is_told_to_end(simulated: Cluster) -> None:
    simulated.will_end("slurm.sh", "waits", "", "")
    with simulated.pod(workers()) as process:
        until(lambda: "ready" in simulated.log, process, simulated)
        process.terminate()
        assert process.wait(60) == 128 + GASP_WRITTEN
    assert (simulated.folder / f"told-{HOSTS['slurm.sh'][0]}").exists()


def test_the_store_serves_while_nodes_save(simulated: Cluster) -> None:
    """The store of a pod that is deleted serves on, and its pod counts as failed."""
    simulated.will_end("slurm.sh", "waits", "", "")
    with simulated.pod(job("store")) as process:
        until(lambda: "ready" in simulated.log, process, simulated)
        (store,) = (each for each in psutil.Process(process.pid).children() if "store" in each.cmdline())
        process.terminate()
        store.kill()  # as when the grace period is over; the shell has outlived the signal before
        assert process.wait(60) == 1
    assert simulated.lines("started") == [f"{HOSTS['slurm.sh'][0]} store 10.0.0.7:29500"]
