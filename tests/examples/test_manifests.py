"""The manifests of examples/clusters say what Kubernetes reads, and pods end with codes that it acts upon."""

from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest
import yaml

from lightning_replica.cli import run as run_command
from lightning_replica.exit_codes import GASP_WRITTEN, NO_PROGRESS
from tests.examples.clusters import CLUSTERS, HOSTS, Cluster, Manifest, container, until

SCHEMAS = yaml.safe_load(Path(__file__).with_name("schemas").joinpath("kubernetes.yaml").read_text())


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
