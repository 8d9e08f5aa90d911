"""What users get wrong when they start several nodes: each is named before anyone waits."""

import errno
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_replica.cli import run
from lightning_replica.cli.main import main
from lightning_replica.errors import ConfigurationError
from lightning_replica.nodes import endpoint, job
from lightning_replica.nodes.node_settings import NodeSettings
from lightning_replica.stores.address import StoreAddress
from lightning_replica.stores.tcp import listen, serve
from tests.support.ranks import free_port

COMMAND = ["python", "train.py", "--epochs", "3"]


def settings(**changes: Any) -> NodeSettings:
    given = NodeSettings(2, 4, StoreAddress("127.0.0.1", free_port()), "none", "127.0.0.1", join_timeout_s=0.1)
    return replace(given, **changes)


@pytest.mark.parametrize(
    ("changes", "command", "said"),
    [
        ({"nproc_per_node": 8}, COMMAND, "Nodes disagree on --nproc-per-node: it is '8' on b, but '4' on a"),
        ({"nnodes": 3}, COMMAND, "Nodes disagree on --nnodes: it is '3' on b, but '2' on a"),
        ({"node_timeout_s": 3.5}, COMMAND, "Nodes disagree on --node-timeout: it is '3.5' on b, but '10' on a"),
        ({}, [*COMMAND[:-1], "4"], "on the script and its arguments: it is 'train.py --epochs 4' on b, but 'train.py"),
    ],
)
def test_nodes_that_were_started_differently(changes: dict[str, Any], command: list[str], said: str) -> None:
    store, first = serve("127.0.0.1"), settings()
    job.compare(store, job.facts(first, COMMAND), "a")
    job.compare(store, job.facts(first, COMMAND), "b")
    with pytest.raises(ConfigurationError) as raised:
        job.compare(store, job.facts(replace(first, **changes), command), "b")
    assert said in str(raised.value)
    assert "Start the same command on all nodes." in str(raised.value)


@pytest.mark.parametrize("python", [[sys.executable], []])
def test_another_script_at_the_same_path(python: list[str], tmp_path: Path) -> None:
    store, script = serve("127.0.0.1"), tmp_path / "train.py"
    script.write_text("Dropout(0.2)")
    command = [*python, str(script), "--epochs", "3"]
    job.compare(store, job.facts(settings(), command), "a")
    job.compare(store, job.facts(settings(), command), "b")
    script.write_text("Dropout(0.3)")
    with pytest.raises(ConfigurationError, match="Nodes disagree on the contents of the script: it is"):
        job.compare(store, job.facts(settings(), command), "b")


def test_other_versions() -> None:
    store, facts = serve("127.0.0.1"), job.facts(settings(), COMMAND)
    job.compare(store, {**facts, "torch": "2.6.0"}, "a")
    with pytest.raises(ConfigurationError, match="Nodes disagree on torch: it is .* on b, but '2.6.0' on a"):
        job.compare(store, facts, "b")


def test_another_service_at_the_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would wait for its answer without end."""
    monkeypatch.setattr(endpoint, "_ANSWER_S", 0.5)
    with listen("127.0.0.1") as other:
        given = settings(store=StoreAddress("127.0.0.1", other.getsockname()[1]), join_timeout_s=1.0)
        with pytest.raises(ConfigurationError, match="has not answered as a store.*no other service has it"):
            endpoint.serve_or_wait(given)


def test_a_port_that_may_not_be_served(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(endpoint, "serve", refuse)
    with pytest.raises(ConfigurationError, match=r"cannot serve the store at 127\.0\.0\.1:80: .*Permission denied"):
        endpoint.serve_or_wait(settings(store=StoreAddress("127.0.0.1", 80)))


def test_an_endpoint_that_nobody_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "own_addresses", frozenset)
    given = settings()
    with pytest.raises(ConfigurationError) as raised:
        endpoint.serve_or_wait(given)
    assert f"No process has served a store at 127.0.0.1:{given.store.port} for 0.1 s" in str(raised.value)
    assert "that its port is open to this node" in str(raised.value)


def test_a_host_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ConfigurationError, match="The host 'nowhere' of the store has not been known for 0.1 s"):
        endpoint.serve_or_wait(settings(store=StoreAddress("nowhere", 1)))


def test_a_name_that_is_this_machine_s_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(2, 1, 6, "", ("127.0.1.1", 29500))])
    with pytest.raises(ConfigurationError, match="'node0' is 127.0.1.1 here, which no other node can reach"):
        endpoint.serve_or_wait(settings(store=StoreAddress("node0", 1)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--nnodes", "1:4"], "--nnodes=1:4: ranks keep their number here, so give one number of nodes"),
        (["--nnodes", "two"], "--nnodes=two: must be a number here."),
        (["--nproc-per-node", "many"], "--nproc-per-node=many: "),
        (["--rdzv-endpoint", "::1"], "--rdzv-endpoint=::1: write an address of IPv6 in brackets, [::1]:PORT."),
        (["--rdzv-conf", "join_timeot=5"], "--rdzv-conf join_timeot=...: known are ca_cert, "),
        (["--node-rank", "1"], "--node-rank=1: nodes have their ranks in the order of their names. Leave it out."),
        (["--max-restarts", "3"], "--max-restarts=3: lost processes are replaced one by one; "),
        (["--local-ranks-filter", "0"], "--local-ranks-filter=0: --redirects and --tee say for each rank where"),
        (["--role", "x"], "--role=x: this command has no --role. Leave it out."),
        (["--rdzv-endpoint", "127.0.0.1:http"], "'127.0.0.1:http' must be an integer"),
        (["--rdzv-endpoint", "no host"], "'no host' must be a dot-separated list of labels"),
        (["--rdzv-conf", "join_timeout"], "--rdzv-endpoint or --rdzv-conf: "),
        (["--rdzv-backend", "zookeeper"], "--rdzv-backend=zookeeper: choose one of c10d, etcd, etcd-v2."),
        (["--rdzv-conf", "join_timeout=soon"], "--rdzv-conf join_timeout=soon: must be a number here."),
        (["--rdzv-conf", "join_timeout=-1"], "join_timeout_s=-1.0 must be a number of seconds, more than 0."),
        (["--nnodes", "0"], "nnodes=0 must be a whole number, 1 or more."),
        (["--spares", "-1"], "spares=-1 must be a whole number, 0 or more."),
        (
            ["--rdzv-endpoint", "nowhere.invalid:1", "--rdzv-conf", "join_timeout=0.1"],
            "The host 'nowhere.invalid' of the",
        ),
        (["--rdzv-backend", "etcd", "--rdzv-endpoint", "a:1,a:1"], "must name each member of etcd once"),
        (["--rdzv-backend", "etcd", "--rdzv-conf", "ca_cert=nowhere"], "ca_cert='nowhere' must be a PEM file"),
        (["--double-up-after", "0"], "double_up_after_s=0.0 must be a number of seconds, more than 0."),
        (["--node-timeout", "0"], "node_timeout_s=0.0 must be a number of seconds, more than 0."),
    ],
)
def test_options(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *options, "train.py"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "endpoint"),
    [
        ([], "127.0.0.1:29500"),
        (["--master-addr", "10.0.0.5", "--master-port", "1234"], "10.0.0.5:1234"),
        (["--rdzv-endpoint", "10.0.0.5"], "10.0.0.5:29500"),
        (["--rdzv-endpoint", "[::1]:5"], "[::1]:5"),
    ],
)
def test_where_nodes_meet(options: list[str], endpoint: str) -> None:
    given = run.parse(["--local-addr", "127.0.0.1", "--nnodes", "2", *options, "train.py"])
    assert run.settings_of(given).store.endpoint == endpoint


def test_one_node_alone() -> None:
    settings = run.settings_of(run.parse(["--standalone", "--nnodes", "7", "train.py"]))
    assert settings.nnodes == 1
    assert settings.store.endpoint.startswith("127.0.0.1:")


@pytest.mark.parametrize(
    ("options", "line"),
    [([], [sys.executable, "x", "a"]), (["-m"], [sys.executable, "-m", "x", "a"]), (["--no-python"], ["x", "a"])],
)
def test_the_command_of_a_rank(options: list[str], line: list[str]) -> None:
    given = run.parse([*options, "x", "a"])
    assert (
        job.training_command(given.training_script, given.training_script_args, given.module, given.no_python) == line
    )


def test_what_an_operator_sets_for_torchrun_is_no_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NODE_RANK", "1")
    assert run.parse(["x"]).node_rank == 1


def test_options_of_the_script_are_not_taken_for_abbreviations() -> None:
    """`--local` could be short for `--local-addr` and others."""
    given = run.parser().parse_args(["--nnodes", "2", "train.py", "--local", "4", "--nproc", "3"])
    assert given.training_script_args == ["--local", "4", "--nproc", "3"]
