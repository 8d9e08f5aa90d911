"""What checkpoints cost on one disk: a dying gasp against raw writes, and a periodic save against torch's own.

    python benchmarks/saving.py                  # 4 ranks, 100 million parameters; takes some minutes
    python benchmarks/saving.py --only gasp --rounds 5

gasp: a job gets SIGTERM in backward. The table shows the time until its last checkpoint is published, by phase. A few
steps earlier in the same job, the same ranks write as many bytes to plain files, with fsync: the best that the disk can
do. Memory is the peak of a rank's resident memory during the gasp, minus its resident memory before.

periodic: one job saves in several ways after each step, in turn: with `CheckpointPublisher`, without and with
async_save, and with torch.distributed.checkpoint's `save` and `async_save` of the same bytes (weights and both moments,
as DTensors of which each rank holds a quarter). The table shows how long training stands still, and how long it takes
until the checkpoint is on the disk.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parent))
from common import spread, write

from lightning_replica import CheckpointPublisher, DyingGaspCheckpoint
from lightning_replica.core.points import listen

warnings.filterwarnings("ignore")
RANKS, WIDTH, DEPTH, BATCH = 4, 4096, 6, 4
PARAMETERS = DEPTH * (WIDTH * WIDTH + WIDTH)
TOTAL_BYTES = 3 * 4 * PARAMETERS  # weights, two moments


class Wide(L.LightningModule):
    """100 million parameters, with little to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-5)


def fit(callbacks: list[Callback], steps: int) -> None:
    torch.manual_seed(0)
    L.Trainer(
        strategy="replica_zero",
        accelerator="cpu",
        devices=RANKS,
        max_steps=steps,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Wide(), DataLoader(TensorDataset(torch.randn(BATCH * RANKS * steps, WIDTH)), batch_size=BATCH))


def write_raw(file: Path) -> float:
    """Return the seconds until every rank's part of the bytes is on the disk."""
    content = torch.randn(TOTAL_BYTES // RANKS // 4).numpy().data
    dist.barrier()
    began = time.monotonic()
    with file.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    dist.barrier()
    passed = time.monotonic() - began
    file.unlink()
    dist.barrier()
    return passed


def memory(name: str) -> int:
    """Return VmRSS or VmHWM of this process, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


class Preempted(Callback):
    """Writes raw bytes after two steps, and sends SIGTERM in the fifth step."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seen: dict[str, float] = {}
        listen(self.reached)

    def reached(self, point: str) -> None:
        if point not in ("gasp", "gasp_write", "save", "track"):
            return
        self.seen[point] = time.monotonic()
        if point == "gasp_write":
            Path("/proc/self/clear_refs").write_text("5")  # reset the peak
            self.seen["before_bytes"] = memory("VmRSS")
        if point == "track":
            self.seen["peak_bytes"] = memory("VmHWM")
            (self.out / f"rank{os.environ['LOCAL_RANK']}.json").write_text(json.dumps(self.seen))

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            self.seen["raw_s"] = write_raw(self.out / f"raw{trainer.global_rank}")

    def on_after_backward(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 4 and trainer.is_global_zero:
            (self.out / "told").write_text(str(time.monotonic()))
            os.kill(os.getppid(), signal.SIGTERM)


def gasp(out: Path) -> None:
    fit([Preempted(out), DyingGaspCheckpoint(out / "checkpoints", grace_s=120)], 20)


class Saves(Callback):
    """Saves in every way after each step, in turn; the first round does not count."""

    def __init__(self, out: Path, rounds: int) -> None:
        self.out, self.rounds = out, rounds
        self.took: dict[str, list[list[float]]] = {}

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        ways: list[Callable[[Path, Any], tuple[float, float]]] = [self.ours, self.dcp, self.ours_async, self.dcp_async]
        number = trainer.global_step
        for way in ways[number % 4 :] + ways[: number % 4]:
            path = self.out / f"step_{number:08d}"
            dist.barrier()
            took = way(path, trainer)
            dist.barrier()
            if number > 1:
                self.took.setdefault(way.__name__, []).append(list(took))
            if trainer.is_global_zero:
                shutil.rmtree(path)
            dist.barrier()
        if number == self.rounds + 1 and trainer.is_global_zero:
            (self.out / "took.json").write_text(json.dumps(self.took))

    def ours(self, path: Path, trainer: Any) -> tuple[float, float]:
        began = time.monotonic()
        trainer.strategy.run_checkpoints.save(path)
        passed = time.monotonic() - began
        return passed, passed

    def ours_async(self, path: Path, trainer: Any) -> tuple[float, float]:
        began = time.monotonic()
        trainer.strategy.run_checkpoints.save_async(path)
        paused = time.monotonic() - began
        assert trainer.strategy.run_checkpoints.settle(path)
        return paused, time.monotonic() - began

    def dcp(self, path: Path, trainer: Any) -> tuple[float, float]:
        import torch.distributed.checkpoint as dcp

        state = self.state(trainer)
        began = time.monotonic()
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path, sync_files=True))
        passed = time.monotonic() - began
        return passed, passed

    def dcp_async(self, path: Path, trainer: Any) -> tuple[float, float]:
        import torch.distributed.checkpoint as dcp

        state = self.state(trainer)
        began = time.monotonic()
        future: Any = dcp.async_save(state, storage_writer=dcp.FileSystemWriter(path, sync_files=True))
        paused = time.monotonic() - began
        future.result()
        return paused, time.monotonic() - began

    def state(self, trainer: Any) -> dict[str, Any]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        mesh = init_device_mesh("cpu", (RANKS,))
        found: dict[str, Any] = {}
        for name, parameter in trainer.lightning_module.named_parameters():
            part = parameter.detach().chunk(RANKS)[trainer.global_rank].clone()  # in memory of its own, as in FSDP
            for kind in ("weight", "exp_avg", "exp_avg_sq"):
                local = part if kind == "weight" else torch.zeros_like(part) + 1
                found[f"{kind}.{name}"] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        return found


def periodic(out: Path, rounds: int) -> None:
    fit([CheckpointPublisher(out), Saves(out, rounds)], rounds + 1)


def job(kind: str, out: Path, rounds: int, code: int) -> None:
    line = [sys.executable, __file__, "--job", kind, "--out", str(out), "--rounds", str(rounds)]
    done = subprocess.run(line, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode != code:
        raise RuntimeError(f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}")


def measure_gasp(directory: Path) -> dict[str, float]:
    """Run one job and return the time of each phase; a phase ends when the last rank has ended it."""
    job("gasp", directory, 0, 75)
    ended = time.monotonic()
    ranks = [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    points = ["gasp", "gasp_write", "save", "track"]
    times = [float((directory / "told").read_text()), *(max(each[point] for each in ranks) for point in points), ended]
    phases = ["the step's end", "agreement", "writing", "publishing", "exit"]
    took = {phase: after - before for phase, before, after in zip(phases, times, times[1:], strict=False)}
    raw_s = max(each["raw_s"] for each in ranks)
    written_s = took["writing"] + took["publishing"]
    extra = max(each["peak_bytes"] - each["before_bytes"] for each in ranks)
    return {
        **took,
        "SIGTERM to published": times[4] - times[0],
        "raw": raw_s,
        "throughput": raw_s / written_s,
        "extra_bytes": extra,
    }


def show_gasp(rounds: int) -> None:
    found = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as directory:
            found.append(measure_gasp(Path(directory)))
    columns = [key for key in found[0] if key not in ("throughput", "extra_bytes")]
    ratio = [each["throughput"] for each in found]
    extra = max(each["extra_bytes"] for each in found) / 2**20
    rate = TOTAL_BYTES / statistics.median(each["raw"] for each in found) / 1e6
    write(
        "saving_gasp",
        f"A dying gasp: {PARAMETERS / 1e6:.0f} million parameters, AdamW, {TOTAL_BYTES / 1e9:.2f} GB, {RANKS} ranks",
        columns,
        [[spread([each[column] for each in found]) for column in columns]],
        f"Seconds, median (middle half) of {rounds} jobs of `benchmarks/saving.py`. Raw is the same ranks writing the same"
        f" bytes, each to a file of its own, with fsync, a few steps before in the same job: {rate:.0f} MB/s. Writing and"
        f" publishing (checksums, manifest, rename and all fsyncs) reach {spread(ratio)} of it. The largest peak of a"
        f" rank's memory is {extra:.0f} MiB above what it had.",
        found,
    )


def show_periodic(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        job("periodic", Path(directory), rounds, 0)
        took = json.loads((Path(directory) / "took.json").read_text())
    names = {
        "ours": "CheckpointPublisher",
        "dcp": "torch DCP `save`",
        "ours_async": "CheckpointPublisher, async_save",
        "dcp_async": "torch DCP `async_save`",
    }
    ratios = {
        kind: spread([a[0] / b[0] for a, b in zip(took[f"ours{kind}"], took[f"dcp{kind}"], strict=True)])
        for kind in ("", "_async")
    }
    write(
        "saving_periodic",
        f"A periodic save: {PARAMETERS / 1e6:.0f} million parameters, AdamW, {TOTAL_BYTES / 1e9:.2f} GB, {RANKS} ranks",
        ["", "training stands still", "on the disk after"],
        [[name, *(spread([each[i] for each in took[way]]) for i in range(2))] for way, name in names.items()],
        f"Seconds, median (middle half) of {rounds} rounds, in turn in one job of `benchmarks/saving.py`. Ours to DCP's,"
        f" round by round: {ratios['']} without, {ratios['_async']} with async_save. Ours also takes"
        " checksums, keeps where training stands, and is there as a whole or not at all; DCP's is the bare state.",
        took,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["gasp", "periodic"])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--job", choices=["gasp", "periodic"], help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.job == "gasp":
        gasp(chosen.out)
    elif chosen.job == "periodic":
        periodic(chosen.out, chosen.rounds)
    else:
        if chosen.only != "periodic":
            show_gasp(chosen.rounds)
        if chosen.only != "gasp":
            show_periodic(chosen.rounds)
