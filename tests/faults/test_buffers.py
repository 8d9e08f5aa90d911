"""Every rank has its own buffers from one forward pass to the next, as under DDP; also one that was replaced."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_replica import CheckpointPublisher, DyingGaspCheckpoint, ReplicaZeroStrategy
from lightning_replica.checkpoint.directory import CheckpointDirectory
from lightning_replica.checkpoint.export import read_whole
from lightning_replica.core.lines import append
from lightning_replica.exit_codes import GASP_WRITTEN
from lightning_replica.state.module_buffers import OWN_BYTES
from tests.support import job, world
from tests.support.accelerators import accelerator
from tests.support.job import Case, Fault
from tests.support.ranks import free_port
from tests.support.trainers import optimizer_of

DEVICES = 2


def digests(buffers: Iterable[Tensor]) -> str:
    return " ".join(hashlib.sha256(each.cpu().numpy().tobytes()).hexdigest()[:8] for each in buffers)


class Plain(L.LightningModule):
    """BatchNorm, a buffer that a validation step writes to, and no hook."""

    drift: Tensor

    def __init__(self, out: Path) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.register_buffer("drift", torch.zeros(3))
        self.out = str(out)

    def note(self, place: str) -> None:
        now = f"{place} {self.trainer.current_epoch} {self.trainer.global_step}"
        append(Path(self.out, f"seen{self.global_rank}"), f"{now}: {digests(self.buffers())}\n")

    def forward(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]) * (1 + self.drift[0] / 100), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.note(f"before training step {batch_idx}")
        loss: Tensor = self(batch)
        self.note(f"after training step {batch_idx}")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.note(f"before validation step {batch_idx}")
        self.log("val", self(batch), sync_dist=True)
        self.drift += 1 + self.global_rank

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.note(f"test {batch_idx}")
        self(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Hooks(Plain):
    """Hooks that write to buffers: the same on all ranks, on one rank alone, another value on each."""

    mean: Tensor
    chief: Tensor
    each: Tensor

    def __init__(self, out: Path) -> None:
        super().__init__(out)
        self.register_buffer("mean", torch.zeros(OWN_BYTES // 4 + 1))
        self.register_buffer("chief", torch.zeros(2))
        self.register_buffer("each", torch.zeros(2))

    def forward(self, batch: Any) -> Tensor:
        return super().forward(batch) * (1 + (self.chief + self.each).sum() / 100)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.each += self.global_rank

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note("before the update")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note(f"end of batch {batch_idx}")
        self.mean.mul_(0.9).add_(next(self.net.parameters()).detach().sum())
        if self.global_rank == 0:
            self.chief += 1
        self.each *= 0.5

    def on_validation_end(self) -> None:
        self.note("validation ends")
        self.each += 1 + self.global_rank

    def on_train_epoch_end(self) -> None:
        self.note("epoch ends")

    def on_train_end(self) -> None:
        self.note("training ends")


class Elsewhere(Plain):
    """A sum of each rank's own, to which code writes that is no hook of a step."""

    sums: Tensor

    def __init__(self, out: Path) -> None:
        super().__init__(out)
        self.register_buffer("sums", torch.zeros(16))

    def forward(self, batch: Any) -> Tensor:
        self.sums += batch[0].mean(0)
        return super().forward(batch) * (1 + self.sums.mean() / 10)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        super().lr_scheduler_step(scheduler, metric)
        self.sums *= 0.5

    def on_train_epoch_end(self) -> None:
        self.sums.zero_()

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Manual(Plain):
    """Makes its own steps. Under Lightning's DDPStrategy, ranks then keep their own buffers for good."""

    def __init__(self, out: Path) -> None:
        super().__init__(out)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer = optimizer_of(self)
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()
        return loss


MODELS: dict[Any, type[Plain]] = {False: Plain, True: Hooks, "manual": Manual, "elsewhere": Elsewhere}


def train(case: Any, out: Path) -> None:
    torch.set_num_threads(1)
    L.seed_everything(7, verbose=False)
    faults, callbacks = job.Faults(case, out), case.callbacks(out)
    if case.ddp:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(case.port), WORLD_SIZE=str(DEVICES), NODE_RANK="0")
    trainer = L.Trainer(
        strategy=(
            DDPStrategy(process_group_backend="gloo")
            if case.ddp
            else ReplicaZeroStrategy(hang_min_s=20.0, hang_max_s=60.0)
        ),
        accelerator=accelerator(case.accelerator),
        devices=DEVICES,
        max_epochs=2,
        callbacks=[*([faults] if case.faults else []), *callbacks],
        accumulate_grad_batches=case.accumulate,
        val_check_interval=4,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=bool(callbacks),
        default_root_dir=out,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    rank = int(os.environ["LOCAL_RANK"])
    model: Plain = MODELS[case.hooks](out)
    x = torch.randn(100, 16) + rank
    data = TensorDataset(x, x.square().sum(1, keepdim=True))
    trainer.fit(model, DataLoader(data, 10, shuffle=True), DataLoader(data, 50), ckpt_path=case.load or None)
    model.note("fit is done")
    trainer.test(model, DataLoader(data, 50), verbose=False)
    weights = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())).hexdigest()
    (out / f"rank{rank}.json").write_text(f'"{weights}"')
    if case.ddp:
        dist.destroy_process_group()


def assert_same(found: "Seen", wanted: "Seen") -> None:
    for rank in range(DEVICES):
        differ = [place for place in found[rank] if found[rank][place] != wanted[rank][place]]
        assert not differ, (rank, differ[0], wanted[rank][differ[0]], found[rank][differ[0]], len(differ))


Seen = list[dict[str, set[str]]]


def seen(out: Path) -> Seen:
    """What each rank saw: by place, epoch and step, the digests of all buffers."""
    found: Seen = []
    for rank in range(DEVICES):
        found.append({})
        for line in (out / f"seen{rank}").read_text().splitlines():
            place, _, digests = line.partition(": ")
            found[-1].setdefault(place, set()).add(digests)
    return found


def no_callbacks(out: Path) -> list[L.Callback]:
    return []


def case_of(hooks: bool, accumulate: int, faults: tuple[Fault, ...] = (), ddp: bool = False, **options: Any) -> Any:
    case: Any = Case(faults, devices=DEVICES, **options)
    case.hooks, case.accumulate, case.ddp, case.port = hooks, accumulate, ddp, free_port()
    case.callbacks = no_callbacks
    return case


def run(out: Path, *arguments: Any, **options: Any) -> world.Outcome:
    outcome = world.run(case_of(*arguments, **options), out, target=train)
    assert outcome.code == 0, outcome.logs
    return outcome


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> Any:
    known: dict[tuple[bool, int, str], tuple[Seen, Any]] = {}

    def look(hooks: bool, accumulate: int, where: str = "cpu") -> tuple[Seen, Any]:
        if (hooks, accumulate, where) not in known:
            out = tmp_path_factory.mktemp("ddp")
            weights = run(out, hooks, accumulate, ddp=True, accelerator=where).ranks
            found = seen(out)
            assert all(len(each) == 1 for rank in found for each in rank.values())
            apart = [place for place in found[0] if found[0][place] != found[1][place]]
            assert len(apart) > 20, "the ranks have the same buffers: nothing is tested"
            known[hooks, accumulate, where] = found, weights
        return known[hooks, accumulate, where]

    return look


FAULTS = {
    "untouched": (),
    "rank 1 before the update": (Fault("kill", 1, "reduction", 4),),
    "rank 0 before the commit": (Fault("kill", 0, "before_commit", 3),),
    "rank 1 after it": (Fault("kill", 1, "after_commit", 3),),
    "rank 0 after it": (Fault("kill", 0, "after_commit", 3),),
    "rank 0 in a validation": (Fault("kill", 0, "validation", 4),),
    "rank 1 in a validation": (Fault("kill", 1, "validation", 4),),
    "rank 1 fails": (Fault("exception", 1, "batch_end", 5),),
    "rank 1 and its replacement, then rank 0": (
        Fault("kill", 1, "reduction", 4),
        Fault("kill", 1, "reduction", 4),
        Fault("kill", 0, "before_commit", 4),
    ),
}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("hooks", [False, True], ids=["plain", "hooks"])
@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
def test_buffers_are_as_under_ddp(
    faults: tuple[Fault, ...], hooks: bool, accumulate: int, ddp: Any, tmp_path: Path
) -> None:
    outcome = run(tmp_path, hooks, accumulate, faults)
    wanted, weights = ddp(hooks, accumulate)
    found = seen(tmp_path)
    assert [rank.keys() for rank in found] == [rank.keys() for rank in wanted]
    assert_same(found, wanted)
    assert outcome.ranks == weights
    assert all((tmp_path / f"fired{number}").exists() for number in range(len(faults))), outcome.logs


SOME = pytest.mark.parametrize(
    "faults", ["untouched", "rank 1 before the update", "rank 0 after it", "rank 0 in a validation"]
)


@SOME
@pytest.mark.parametrize("model", ["manual", "elsewhere"])
def test_other_models(model: str, faults: str, ddp: Any, tmp_path: Path) -> None:
    outcome = run(tmp_path, model, 1, FAULTS[faults])
    wanted, weights = ddp(model, 1)
    assert_same(seen(tmp_path), wanted)
    assert outcome.ranks == weights


@SOME
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.skipif(not torch.cuda.is_available() or not dist.is_nccl_available(), reason="needs a GPU and NCCL")
def test_on_one_gpu(model: Any, faults: str, ddp: Any, tmp_path: Path) -> None:
    """Over NCCL; DDP, which NCCL refuses there, over gloo."""
    outcome = run(tmp_path, model, 1, FAULTS[faults], accelerator="one gpu, nccl")
    wanted, weights = ddp(model, 1, "one gpu")
    assert_same(seen(tmp_path), wanted)
    assert outcome.ranks == weights


def saves(out: Path) -> list[L.Callback]:
    return [CheckpointPublisher(out / "saved", every_n_train_steps=3)]


def gasps(out: Path) -> list[L.Callback]:
    return [DyingGaspCheckpoint(out / "saved")]


def last(out: Path) -> Path:
    path = CheckpointDirectory(out / "saved").latest().path
    assert path is not None
    return Path(str(path))


def of_checkpoint(out: Path, hooks: bool) -> str:
    """The digests of the buffers in the checkpoint that the tracker names."""
    state = read_whole(last(out))["state_dict"]
    return digests(state[name] for name, _ in MODELS[hooks](out).named_buffers())


@pytest.mark.parametrize("hooks", [False, True], ids=["plain", "hooks"])
def test_a_checkpoint_has_rank_0s(hooks: bool, ddp: Any, tmp_path: Path) -> None:
    """Each rank writes a part of it."""
    case = case_of(hooks, 1)
    case.callbacks = saves
    assert world.run(case, tmp_path, target=train).code == 0
    wanted, _ = ddp(hooks, 1)
    assert {of_checkpoint(tmp_path, hooks)} == wanted[0][
        "end of batch 7 1 18" if hooks else "after training step 7 1 17"
    ]


@pytest.mark.parametrize("point", ["reduction", "after_commit"])
@pytest.mark.parametrize("rank", range(DEVICES))
@pytest.mark.parametrize("hooks", [False, True], ids=["plain", "hooks"])
def test_a_last_checkpoint_has_rank_0s(hooks: bool, rank: int, point: str, ddp: Any, tmp_path: Path) -> None:
    """Whoever writes it, and whether the step is done or not."""
    case = case_of(hooks, 1, (Fault("kill", rank, point, 3),), gasp=True)
    case.callbacks = gasps
    outcome = world.run(case, tmp_path, max_restarts=0, target=train)
    assert outcome.code == GASP_WRITTEN, outcome.logs
    wanted, _ = ddp(hooks, 1)
    update = "before the update 0 {}" if hooks else "after training step {0} 0 {0}"
    # Where rank 0 had not begun the batch yet, it ends in the tail of the one before, which a resumed run does again.
    places = ("before training step 3 0 3", update.format(2)) if point == "reduction" else (update.format(3),)
    assert of_checkpoint(tmp_path, hooks) in set().union(*(wanted[0][place] for place in places))


def validated(out: Path) -> list[L.Callback]:
    """Saves after a validation, whose steps write to buffers of each rank's own."""
    return [ModelCheckpoint(out, "{step}", save_top_k=-1, monitor=None, save_on_train_epoch_end=False)]


PLACES = ("reduction 4", "after_commit 3", "validation 4", "train_batch_end 6")
# A checkpoint that a callback writes lacks what the hooks after it do.
RESUMES = [*((hooks, where) for hooks in (False, True) for where in PLACES), (False, "saved")]


@pytest.mark.parametrize(("hooks", "where"), RESUMES)
def test_a_resumed_run_goes_on_with_them(hooks: bool, where: str, ddp: Any, tmp_path: Path) -> None:
    first = tmp_path / "first"
    if where == "saved":
        case = case_of(hooks, 1)
        case.callbacks = validated
        assert world.run(case, first, target=train).code == 0
        path = first / "step=8.ckpt"
    else:
        point, step = where.split()
        case = case_of(hooks, 1, (Fault("sigterm", 1, point, int(step)),), gasp=True)
        case.callbacks = gasps
        outcome = world.run(case, first, target=train)
        assert outcome.code == GASP_WRITTEN, outcome.logs
        path = last(first)
    then = case_of(hooks, 1, load=str(path))
    outcome = world.run(then, tmp_path / "then", target=train)
    assert outcome.code == 0, outcome.logs
    wanted, weights = ddp(hooks, 1)
    assert_same(seen(tmp_path / "then"), wanted)
    assert outcome.ranks == weights
