"""Many seeded faults in one run of `lightning-replica chaos`, on a training with everything that can go out of step.

    python benchmarks/chaos.py                                  # 10 runs of 22 faults
    python benchmarks/chaos.py --kinds kill,exception --runs 1 --faults 5
    python benchmarks/chaos.py --outside 20 --targets rank,worker,standby,supervisor    # signals to any process
    python benchmarks/chaos.py --forked --jobs 4 --runs 12      # 48 runs: many more faults in the time

Everything works as it does for a user: the tool runs this script (with --train), and the replacement of a lost rank
starts Python and imports torch and lightning. With --forked, every Python is forked from one that has already imported
them, which saves most of the time; everything else is the same. A run is flaky if it fails or ends with different bits
than the untouched run.
"""

import argparse
import contextlib
import io
import json
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parent))
from common import write

from lightning_replica import ReplicaZeroStrategy

warnings.filterwarnings("ignore")
KINDS = "kill,exception,hang,exit,memory,corrupt,sigterm"


class Module(L.LightningModule):
    """A model with dropout, two schedulers, and metrics that differ from rank to rank."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.LayerNorm(128), nn.Dropout(0.2), nn.Linear(128, 1))

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, _: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        per_step = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.95), "interval": "step"}
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
        return [optimizer], [per_step, {"scheduler": plateau, "monitor": "val", "strict": False}]


def train(args: argparse.Namespace) -> None:
    L.seed_everything(7, verbose=False)
    x = torch.randn(4 * args.ranks * 40, 32)  # 20 steps an epoch, of two batches each
    data = TensorDataset(x, x.square().sum(1, keepdim=True))
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            strategy=ReplicaZeroStrategy(standby=args.standby),
            accelerator="cpu",
            devices=args.ranks,
            max_steps=args.steps,
            accumulate_grad_batches=2,
            gradient_clip_val=0.7,
            val_check_interval=10,
            limit_val_batches=2,
            log_every_n_steps=1,
            logger=CSVLogger(folder),
            callbacks=[ModelCheckpoint(folder, every_n_train_steps=15)],
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        training = DataLoader(data, batch_size=4, shuffle=True, num_workers=args.workers)
        trainer.fit(Module(), training, DataLoader(data, batch_size=4))


class Tee(io.StringIO):
    """Writes text to stdout and keeps it."""

    def write(self, text: str) -> int:
        sys.__stdout__.write(text)  # type: ignore[union-attr]
        sys.__stdout__.flush()  # type: ignore[union-attr]
        return super().write(text)


def run_forked(line: list[str]) -> tuple[int, str]:
    """Run the tool in this process, and every script that it starts in a fork of a process that has imported torch."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from lightning_replica.cli.main import main as tool
    from tests.support.forked_python import scripts_are_forked

    tee = Tee()
    with scripts_are_forked(), contextlib.redirect_stdout(tee):
        code = tool(line)
    return code, tee.getvalue()


def measure(args: argparse.Namespace, out: Path) -> tuple[int, str, float]:
    """Run the tool; return its exit code, its output, and the seconds that it took."""
    command = [
        sys.executable,
        *([] if args.forked else ["-W", "ignore"]),
        __file__,
        "--train",
        "--ranks",
        str(args.ranks),
        "--steps",
        str(args.steps),
        *(["--workers", "1", "--standby", "1"] if args.outside else []),
    ]
    options = ["--runs", str(args.runs), "--seed", str(args.seed)]
    if args.outside:
        options += ["--outside", str(args.outside), "--signals", args.signals, "--targets", args.targets]
    else:
        options += ["--faults", str(args.faults), "--kinds", args.kinds]
    options += ["--points", args.points] if args.points else []
    begin = time.monotonic()
    line = ["chaos", *options, "--out", str(out), "--", *command]
    if args.forked:
        return *run_forked(line), time.monotonic() - begin
    done = subprocess.Popen(
        [sys.executable, "-m", "lightning_replica", *line],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = []
    assert done.stdout is not None
    for line in done.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    return done.wait(), "".join(lines), time.monotonic() - begin


def measure_all(args: argparse.Namespace, out: Path) -> tuple[int, list[str], float]:
    """Run the tool once, or `args.jobs` times side by side with different seeds, because it mostly waits."""
    if args.jobs == 1:
        code, text, took_s = measure(args, out)
        return code, [text], took_s
    begin = time.monotonic()
    given = [*sys.argv[1:], "--jobs", "1"]
    jobs = [
        subprocess.Popen(
            [
                sys.executable,
                __file__,
                *given,
                "--one-of-many",
                "--keep",
                f"{out}-{job}",
                "--seed",
                str(args.seed + job * args.runs),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        for job in range(args.jobs)
    ]
    texts = [job.communicate()[0] for job in jobs]
    return max(job.returncode for job in jobs), texts, time.monotonic() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--faults", type=int, default=22, help="faults in each run; some may not reach their point")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=KINDS)
    parser.add_argument("--points", help="points where faults strike (all)")
    parser.add_argument("--outside", type=int, metavar="N", help="send N signals from outside in each run instead")
    parser.add_argument("--signals", default="kill,stop,segv,bus,abort")
    parser.add_argument("--targets", default="rank,worker,standby,supervisor")
    parser.add_argument("--forked", action="store_true", help="fork Pythons instead of starting them")
    parser.add_argument("--workers", type=int, default=0, help="workers of each DataLoader")
    parser.add_argument("--standby", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="how many copies of this benchmark to run side by side")
    parser.add_argument("--one-of-many", action="store_true", help="only print the output of the tool")
    parser.add_argument("--train", action="store_true", help="act as the training script that the tool runs")
    parser.add_argument("--keep", type=Path, help="a new folder for logs and fingerprints")
    args = parser.parse_args()
    if args.train:
        train(args)
        return
    out = args.keep or Path(tempfile.mkdtemp()) / "chaos"
    code, texts, took_s = measure_all(args, out)
    if args.one_of_many:
        sys.exit(code)
    rows, runs = [], {}
    for job, text in enumerate(texts):
        rows += re.findall(
            r"^  (\d+) +((?:outside:)?(\w+):[\d-]+:([\w-]+):\d+) +(step \d+\S*.*?|not reached)  +(.*?)  +(\S+)$",
            text,
            re.M,
        )
        found = re.findall(r"^run (\d+): \d+ faults? struck, (\w+)$", text, re.M)
        runs |= {f"{job}/{run}": verdict for run, verdict in found}
    if not rows:
        sys.exit(code)
    struck = [row for row in rows if row[4] != "not reached"]
    flaky = sum(verdict != "identical" for verdict in runs.values())
    verdicts: dict[str, Counter[str]] = {}
    for row in struck:
        verdicts.setdefault(row[2], Counter())[row[6]] += 1
    columns = ["identical", "different", "failed"]
    table = [
        [kind, str(counts.total()), *(str(counts[column]) for column in columns)]
        for kind, counts in sorted(verdicts.items())
    ]
    total = Counter(row[6] for row in struck)
    table.append(["all", str(len(struck)), *(str(total[column]) for column in columns)])
    places = ", ".join(f"{place} {count}" for place, count in Counter(row[3] for row in struck).most_common())
    notes = f"""
{len(struck)} seeded {"signals from outside" if args.outside else "faults"} in {len(runs)} runs of {args.steps} steps, {total["identical"]} bit-identical. Flake rate: {flaky} of
{len(runs)} runs. {len(rows) - len(struck)} faults were not reached. {args.ranks} ranks, R=2; {took_s / 60:.1f} minutes in all. A
fault counts as what its run came to. SIGTERM ends a run; up to there it is compared.

Where: {places}.
"""
    raw = {"code": code, "seconds": took_s, "runs": runs, "faults": [[row[0], row[1], row[4], row[6]] for row in rows]}
    write(
        "chaos_outside" if args.outside else "chaos_forked" if args.forked else "chaos",
        "Chaos: seeded signals from outside" if args.outside else "Chaos: seeded faults, compared bit by bit",
        ["kind", "faults", *columns],
        table,
        notes,
        json.loads(json.dumps(raw)),
    )
    sys.exit(code)


if __name__ == "__main__":
    main()
