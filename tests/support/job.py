"""The training that the fault matrix runs: small, but with everything that can go out of step."""

import hashlib
import json
import os
import signal
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_replica import ReplicaZeroStrategy
from lightning_replica.callbacks import DyingGaspCheckpoint
from lightning_replica.chaos.flip import flip_bit
from lightning_replica.core.grids import Grids
from lightning_replica.core.lines import append
from lightning_replica.core.points import listen
from lightning_replica.launch.beacons import HangLimits
from lightning_replica.sharding.state import ShardedState
from tests.support.accelerators import accelerator
from tests.support.doubles import overriding
from tests.support.trainers import state_of, strategy_of
from tests.support.typed import tensor_of

# Points of the package (lightning_replica.points), then points in the user's own code.
INSIDE = ("batch_start", "reduction", "before_commit", "after_commit", "update", "gather", "batch_end")
OUTSIDE = (
    "forward",
    "backward",
    "torn",
    "scheduler",
    "logger",  # rank 0 only: Lightning gives the others no logger
    "train_batch_end",
    "checkpoint",
    "validation",
    "epoch_end",
    "train_end",
)


# Of cases in which nobody is meant to hang: should somebody nevertheless, that is seen, and by its stack.
HANG = (20.0, 60.0)


class Injected(Exception):
    """A fault of the kind "exception"."""


@dataclass
class Fault:
    """One process's fault: ``step`` is the updates applied when ``point`` is reached; None for whenever that is first.

    Kinds and points are those of `lightning_replica.chaos`, and a few more. Kinds: "interrupt" (SIGINT), "hear <n>"
    (signal n), "tell <n>" (signal n to the supervisor), "sleep" (without end), "npu <kind>" (see `simulated_npu.fail`).
    """

    kind: str
    rank: int
    point: str
    step: int | None

    def is_here(self, point: str, step: int) -> bool:
        """Whether the place is this process's, now."""
        here = (int(os.environ["LOCAL_RANK"]), point, step)
        return here == (self.rank, self.point, step if self.step is None else self.step)

    def strikes_with(self, other: "Fault") -> bool:
        """Whether ranks come to both at the same time, if none gets past the place before all are there."""
        same = (self.kind, self.point, self.step) == (other.kind, other.point, other.step)
        return same and self.rank != other.rank

    def reach(
        self, point: str, step: int, marker: Path, state: ShardedState | None = None, others: Sequence[Path] = ()
    ) -> None:
        """Fails if this is the place, once in the whole run: ``marker`` says that it has.

        The ``others`` are markers to wait for. A rank that is late would otherwise be called back by the failure of
        the first, and might not come to the place again.
        """
        if self.is_here(point, step) and not marker.exists():
            marker.touch()
            while not all(other.exists() for other in others):
                time.sleep(0.001)
            if self.kind == "corrupt":
                assert state is not None
                marker.write_text(flip_bit(state.shard(), zlib.crc32(f"{self.rank}{point}{step}".encode())))
                return
            if self.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.kind == "sigterm":
                os.kill(os.getpid(), signal.SIGTERM)
                return
            if self.kind == "interrupt":
                os.kill(os.getpid(), signal.SIGINT)
                return
            if self.kind.startswith("hear "):
                os.kill(os.getpid(), int(self.kind.split()[1]))
                return
            if self.kind.startswith("tell "):  # the supervisor, which runs in the process of the test itself
                os.kill(int(os.environ["TESTED_BY"]), int(self.kind.split()[1]))
                return
            if self.kind == "exit":
                os._exit(3)
            if self.kind == "memory":
                raise MemoryError(f"at {point} of step {step}")
            if self.kind.startswith("npu "):
                assert state is not None
                # by its name as a text: a device is no state of the user's code, which goes back with the step
                import_module("tests.support.simulated_npu").fail(self.kind.removeprefix("npu "), state)
            if self.kind == "hang":
                os.kill(os.getpid(), signal.SIGSTOP)
            if self.kind == "sleep":
                time.sleep(1e6)
            raise Injected(f"at {point} of step {step}")


@dataclass
class Case:
    """What to train and what goes wrong."""

    faults: tuple[Fault, ...] = ()
    replicas: int = 2
    devices: int = 4
    accumulate: int = 2
    epochs: int = 2
    max_tries: int = 3
    clip: float | None = 0.7
    hang: tuple[float, float] = HANG
    guard: Literal["sampled", "full", "off"] = "full"
    gasp: bool = False
    grace_s: float = 25.0
    load: str = ""
    accelerator: str = "cpu"  # or one of support.accelerators
    nodes: int = 1  # of the grid; all ranks run here
    shared_memory: bool = True
    reduce_dtype: Literal["bfloat16"] | None = None


@overriding(new=("nodes", "assert_used"))
class OfNodes(ReplicaZeroStrategy):
    """Reduces and gathers on two levels, although all ranks run on one node."""

    nodes = 1

    @property
    def grids(self) -> Grids:
        (grid,) = super().grids.grids
        return Grids.of(replace(grid, nodes=self.nodes))

    def assert_used(self) -> None:
        """Assert that the ranks of this run have met in the grid that is wanted here."""
        (grid,) = self.session.world.grids.grids
        assert grid.nodes == self.nodes


def watch_closely(rank: int, limit_s: float) -> None:
    """Gives the first process of ``rank`` little time wherever it works or recovers.

    All others may be slow, and who waits may be kept from a processor for long, as happens on a busy machine.
    """
    if (int(os.environ["LOCAL_RANK"]), os.environ["LIGHTNING_REPLICA_GENERATION"]) == (rank, "0"):
        limits = HangLimits(HANG[0], limit_s, limit_s)
        HangLimits.of = classmethod(lambda cls, options: limits)  # type: ignore[method-assign, assignment]


class Faults(Callback):
    """Reaches the points that lie in the user's code, and writes down what the rank has seen."""

    def __init__(self, case: Case, out: Path) -> None:
        self.case, self.out = case, out

    @property
    def state(self) -> ShardedState | None:
        return state_of(self.strategy) if self.strategy._training else None

    def reach(self, point: str, step: int) -> None:
        marked = {self.out / f"fired{number}": fault for number, fault in enumerate(self.case.faults)}
        for marker, fault in marked.items():
            others = [other for other, each in marked.items() if each.strikes_with(fault)]
            fault.reach(point, step, marker, self.state, others)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.strategy = strategy_of(trainer)
        listen(lambda point: self.reach(point, self.state.step if self.state else -1))
        self.reach("setup", -1)

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.reach("train_start", -1)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        digest = hashlib.sha256(batch[0].cpu().numpy().tobytes()).hexdigest()[:12]
        append(self.out / f"batches{trainer.global_rank}", f"{trainer.current_epoch} {batch_idx} {digest}\n")

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.reach("train_batch_end", trainer.global_step)

    def on_save_checkpoint(self, trainer: L.Trainer, *args: Any) -> None:
        self.reach("checkpoint", trainer.global_step)

    def on_validation_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if not trainer.sanity_checking:
            self.reach("validation", trainer.global_step)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.reach("epoch_end", trainer.global_step)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.reach("train_end", trainer.global_step)


class Lines(Logger):
    """Keeps nothing, but can fail."""

    name, version = "lines", 0

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.faults = faults

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to keep."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.faults.reach("logger", self.faults.state.step if self.faults.state else -1)


class TornAdamW(torch.optim.AdamW):
    """Writes garbage into the shard before it fails, as an update cut short would."""

    before: Any = None

    def step(self, closure: Any = None) -> Any:
        pieces = [p for group in self.param_groups for p in group["params"]]
        saved = pieces[0].detach().clone()
        with torch.no_grad():
            pieces[0].fill_(1e30)
        self.before()
        with torch.no_grad():
            pieces[0].copy_(saved)
        return super().step(closure)


class Model(L.LightningModule):
    """Dropout, two param groups, two schedulers, metrics of three kinds."""

    seen: Tensor

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self._faults = [faults]  # in a list: not a child
        self.first = nn.Linear(16, 24)
        self.norm = nn.LayerNorm(24)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(24, 1)
        with torch.random.fork_rng():  # every rank gets rank 0's, which no other rank can make again
            torch.manual_seed(int(os.environ["LOCAL_RANK"]))
            self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if hidden.requires_grad:
            step = self.trainer.global_step
            hidden.register_hook(lambda _: self._faults[0].reach("backward", step))
        return self.last(self.frozen(self.drop(torch.tanh(self.norm(hidden)))))

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self._faults[0].reach("forward", self.trainer.global_step)
        self.seen += 1
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("own", loss * (1 + self.global_rank), on_step=False, on_epoch=True)
        return {"loss": loss, "extra": loss.detach() * 2}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self._faults[0].reach("scheduler", self.trainer.global_step)
        super().lr_scheduler_step(scheduler, metric)

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim > 1]
        vectors = [p for p in self.parameters() if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 2e-2}]
        optimizer = TornAdamW(groups, lr=1e-2)
        optimizer.before = lambda: self._faults[0].reach("torn", strategy_of(self.trainer).state.step)
        per_step = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9), "interval": "step"}
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return [optimizer], [per_step, {"scheduler": plateau, "monitor": "own_sum", "strict": False}]

    def on_train_epoch_end(self) -> None:
        # Differs from rank to rank until it is reduced: lost with its rank unless peers keep it.
        own = self.trainer.callback_metrics["own"]
        total = tensor_of(self.all_gather(own)).sum()
        self.log("own_sum", total)


def strategy_options(case: Case) -> dict[str, Any]:
    """What a case says of any strategy."""
    return {
        "replicas": case.replicas,
        "bucket_bytes": 1024,
        "shared_memory": case.shared_memory,
        "max_tries": case.max_tries,
        "hang_min_s": case.hang[0],
        "hang_max_s": case.hang[1],
        "guard": case.guard,
    }


def strategy_with_default_guard(case: Case) -> ReplicaZeroStrategy:
    """The strategy of a case, with the guard that users have."""
    return ReplicaZeroStrategy(**{name: value for name, value in strategy_options(case).items() if name != "guard"})


def digest_of_optimizers(state: ShardedState) -> str:
    """A digest of what all optimizers keep of this rank's shard."""
    return _digest(*[t for sharded in state.optimizers for _, t in sorted(sharded.state()[0].items())])


def run(case: Case, out: Path, callbacks: tuple[Callback, ...] = (), logger: Any = None, **options: Any) -> None:
    """Trains in one rank and writes down what came of it; ``options`` are the strategy's."""
    torch.set_num_threads(1)
    L.seed_everything(7, verbose=False)
    x = torch.randn(4 * 6 * 5, 16)
    data = TensorDataset(x, x.square().sum(1, keepdim=True))
    faults = Faults(case, out)
    model = Model(faults)
    OfNodes.nodes = case.nodes
    strategy = OfNodes(**strategy_options(case), reduce_dtype=case.reduce_dtype, **options)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator=accelerator(case.accelerator),
        devices=case.devices,
        max_epochs=case.epochs,
        accumulate_grad_batches=case.accumulate,
        val_check_interval=3,
        limit_val_batches=2,
        gradient_clip_val=case.clip,
        callbacks=[
            faults,
            *callbacks,
            *([DyingGaspCheckpoint(out / "gasp", case.grace_s)] if case.gasp else ()),
            ModelCheckpoint(out / "checkpoints", every_n_train_steps=2),
        ],
        logger=Lines(faults) if logger is None else logger,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    loaders = DataLoader(data, batch_size=5, shuffle=True), DataLoader(data, batch_size=5)
    trainer.fit(model, *loaders, ckpt_path=case.load or None)
    strategy.assert_used()
    (out / f"rank{trainer.global_rank}.json").write_text(json.dumps(_result(trainer, model)))


def _result(trainer: L.Trainer, model: Model) -> dict[str, Any]:
    state = state_of(strategy_of(trainer))
    optimizer = trainer.optimizers[0]
    return {
        "weights": _digest(*model.parameters(), *model.buffers()),
        "main": _digest(*[buffers.main for buffers in state.buffers]),
        "optimizer": digest_of_optimizers(state),
        "groups": [[group["lr"], group["weight_decay"]] for group in optimizer.param_groups],
        "schedulers": repr([config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]),
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "random": _digest(torch.get_rng_state()),
        "progress": [trainer.global_step, trainer.current_epoch, trainer.fit_loop.epoch_loop.total_batch_idx],
        "batches_that_stepped": trainer.fit_loop.epoch_loop._batches_that_stepped,
    }


def _digest(*tensors: Tensor) -> str:
    return hashlib.sha256(b"".join(t.detach().cpu().numpy().tobytes() for t in tensors)).hexdigest()[:16]


__all__ = ["INSIDE", "OUTSIDE", "Case", "Fault", "asdict", "run"]
