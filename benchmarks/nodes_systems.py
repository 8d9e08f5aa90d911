"""What each system does that `nodes.py` compares, as a rank and as the command that starts it on a machine."""

import hashlib
import os
import socket
import subprocess
import sys
import time
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import BATCH, LENGTH, QUIET, VOCABULARY, loss_of
from recovery_peers import Trace, batches, parts, with_torchrun

SCRIPT = Path(__file__).resolve().with_name("nodes.py")  # ranks run it
NODES, RANKS_OF_NODE = 2, 2
RANKS = NODES * RANKS_OF_NODE
STEPS = 60  # of an exact run; the others end soon after the loss
MAX_RESTARTS = 3  # of a node
LIGHTHOUSE, STORE = 29510, 29500  # ports
SYSTEMS = ("replica_zero", "replica_zero, 5 s", "torchrun", "torchft", "torchft, spare")


def known_version(package: str) -> str:
    """Return a package's name and version."""
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"


def available() -> list[str]:
    """Return the systems that are installed."""
    has_torchft = not known_version("torchft").startswith("no ")
    return [system for system in SYSTEMS if has_torchft or not system.startswith("torchft")]


# A rank of each system


def mark(place: Path, what: str, rank: int) -> None:
    """Record that a rank has come to a place of its script."""
    with (place / "marks").open("a") as file:
        file.write(f"{what} {rank} {time.monotonic_ns()}\n")


def with_replica_zero(trace: Trace) -> None:
    """Train as a user does, with a LightningModule and a Trainer, and record the digest of the weights at the end."""
    import lightning as L
    from lightning.pytorch.callbacks import Callback
    from module import Module
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_replica import RecoveryReport, ReplicaZeroStrategy

    class Ended(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            trace.ended(trainer.global_step, trainer.world_size)

    torch.manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (BATCH * RANKS * (STEPS + 1), LENGTH))
    trainer = L.Trainer(
        strategy=ReplicaZeroStrategy(),
        accelerator="cpu",
        devices=RANKS_OF_NODE,
        num_nodes=NODES,
        max_steps=STEPS,
        callbacks=[Ended(), RecoveryReport(trace.place / "recovery.jsonl")],
        **QUIET,
    )
    module = Module()
    mark(trace.place, "fit", trace.rank)
    trainer.fit(module, DataLoader(TensorDataset(tokens), batch_size=BATCH))
    digest = hashlib.sha256()
    for weight in module.state_dict().values():
        digest.update(weight.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    (trace.place / f"weights{trace.rank}").write_text(digest.hexdigest())


def with_torchft(trace: Trace, spare: bool) -> None:
    """Train with a replica group for each rank, and the time-outs of torchft's own example, train_ddp.py.

    Args:
        trace: Records the steps.
        spare: Whether there are more groups than are needed; those add gradients of zero until others are lost.
    """
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
    from torchft.manager import WorldSizeMode

    class Wrapped(DistributedDataParallel):
        """Goes on when a collective fails: the hook of torchft 0.2 then ends the process (`assert fut._fut`)."""

        @staticmethod
        def _comm_hook(state: Manager, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            state.allreduce(bucket.buffer()).wait()  # tells the manager of an error, so that it does not commit
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

    model, inner = parts()
    address = socket.gethostbyname(socket.gethostname())
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=RANKS if spare else 1,
        world_size_mode=WorldSizeMode.FIXED_WITH_SPARES if spare else WorldSizeMode.DYNAMIC,
        timeout=timedelta(seconds=30),
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        replica_id=f"replica_{trace.rank}",
        hostname=address,
    )
    wrapped, optimizer = Wrapped(manager, model), Optimizer(manager, inner)
    data = batches(trace.rank, STEPS)
    while True:
        step = manager.current_step()
        optimizer.zero_grad()
        loss_of(wrapped, data[step % STEPS]).backward()
        optimizer.step()
        if manager.current_step() > step:
            trace.ended(manager.current_step(), manager.num_participants())


def torchft_node(system: str, number: int, place: Path) -> None:
    """Run the ranks of a node, and start again at once any that ends, as torchrun would."""

    def start(rank: int) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(own(system, place), env={**os.environ, "RANK": str(rank)})

    ranks = range(number * RANKS_OF_NODE, (number + 1) * RANKS_OF_NODE)
    processes, restarts = {rank: start(rank) for rank in ranks}, 0
    while restarts <= MAX_RESTARTS:
        for rank, process in processes.items():
            if process.poll() is not None:
                processes[rank], restarts = start(rank), restarts + 1
        time.sleep(0.01)


def train(system: str, place: Path) -> None:
    """Be one rank."""
    torch.set_num_threads(1)
    trace = Trace(place, int(os.environ["RANK"]), kills=0)
    mark(place, "script", trace.rank)
    if system.startswith("replica_zero"):
        with_replica_zero(trace)
    elif system == "torchrun":
        with_torchrun(trace, 10**4)
    else:
        with_torchft(trace, spare=system == "torchft, spare")


# What the machines run


def own(system: str, place: Path) -> list[str]:
    """Return the command line of nodes.py as a rank."""
    return [sys.executable, str(SCRIPT), "--rank-of", system, "--place", str(place)]


def command(system: str, number: int, store: str, place: Path) -> list[str]:
    """Return what a machine runs.

    Args:
        system: The system.
        number: Number of the machine.
        store: Address of the first machine.
        place: The directory that all processes share.
    """
    nodes = ["--nproc-per-node", str(RANKS_OF_NODE), "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{store}:{STORE}"]
    if system.startswith("replica_zero"):
        launcher = ["lightning_replica", "run", "--nnodes", str(NODES), "--spares", "1"]
        launcher += ["--node-timeout", "5"] if system.endswith("5 s") else []
    elif system == "torchrun":
        launcher = ["torch.distributed.run", "--nnodes", f"{NODES}:{NODES}", "--rdzv-id", "1"]
        launcher += ["--max-restarts", str(MAX_RESTARTS)]
    else:
        return [*own(system, place), "--node", str(number)]
    return [sys.executable, "-m", *launcher, *nodes, *own(system, place)[1:]]


def lighthouse(system: str) -> list[str]:
    """Return the command line of torchft's lighthouse, as its README has it, but that it waits for enough groups."""
    least = RANKS if system == "torchft, spare" else RANKS_OF_NODE
    program = str(Path(sys.executable).with_name("torchft_lighthouse"))
    options = ["--min_replicas", str(least), "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
    return [program, *options, "--bind", f"[::]:{LIGHTHOUSE}"]
