"""Makes this machine look like several to the scripts of examples/clusters."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"
# All are this machine. The store's address has no user; with ssh each host comes to serve it when others are lost.
HOSTS = {"ssh.sh": [f"user{number}@127.0.0.1" for number in range(3)], "slurm.sh": ["127.0.0.1", "node1", "node2"]}

Manifest = dict[str, Any]

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
            out: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
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


def until(ready: Callable[[], bool], process: "subprocess.Popen[str]", cluster: Cluster) -> None:
    while not ready():
        assert process.poll() is None, cluster.log
        time.sleep(0.01)


def container(pods: Manifest) -> Manifest:
    """The only container of a pod."""
    (found,) = pods["template"]["spec"]["containers"]
    return dict(found)
