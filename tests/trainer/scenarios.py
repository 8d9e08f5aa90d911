"""What trains under DDP: one small training for each thing that users rely on.

Each function returns a module and the trainer's options; `fit` runs it under a strategy.
"""

import copy
import random
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import MeanMetric

from tests.support.trainers import optimizer_of
from tests.support.typed import grad_of

Scenario = Callable[[], tuple["Net", dict[str, Any]]]
SCENARIOS: dict[str, Scenario] = {}
INPUTS = 12


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


def data(samples: int = 64, batch: int = 4, **options: Any) -> DataLoader[Any]:
    x = torch.randn(samples, INPUTS, generator=torch.Generator().manual_seed(5))
    return DataLoader(TensorDataset(x, x.square().sum(1, keepdim=True) / 8), batch_size=batch, **options)


class Net(L.LightningModule):
    """Two layers; everything that scenarios change is an argument or an override."""

    def __init__(self, optimizer: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self.body = nn.Linear(INPUTS, 20)
        self.head = nn.Linear(20, 1)
        self._make = optimizer or (lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return self._make(self.parameters())

    def train_dataloader(self) -> Any:
        return data(shuffle=True)

    def val_dataloader(self) -> Any:
        return data(16)


# Optimizers, clipping, accumulation


@scenario
def plain() -> tuple[Net, dict[str, Any]]:
    return Net(), {}


@scenario
def clip_norm() -> tuple[Net, dict[str, Any]]:
    return Net(), {"gradient_clip_val": 0.3}


@scenario
def clip_value() -> tuple[Net, dict[str, Any]]:
    return Net(), {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}


@scenario
def accumulation() -> tuple[Net, dict[str, Any]]:
    return Net(), {"accumulate_grad_batches": 3}


@scenario
def accumulation_that_changes() -> tuple[Net, dict[str, Any]]:
    return Net(), {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 2})]}


@scenario
def fused() -> tuple[Net, dict[str, Any]]:
    return Net(lambda p: torch.optim.Adam(p, lr=1e-2, fused=True)), {"gradient_clip_val": 0.3}


class AsksForClosure(torch.optim.SGD):
    """Somebody's own, which takes for granted what Lightning always gives."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        super().step()
        return loss


class Anneals(torch.optim.SGD):
    """Does more in ``zero_grad``, and takes less, as apex's optimizers do."""

    def zero_grad(self) -> None:  # type: ignore[override]
        super().zero_grad()
        for group in self.param_groups:
            group["lr"] *= 0.95


@scenario
def own_zero_grad() -> tuple[Net, dict[str, Any]]:
    return Net(lambda p: Anneals(p, lr=0.05)), {}


@scenario
def momentum() -> tuple[Net, dict[str, Any]]:
    return Net(lambda p: AsksForClosure(p, lr=0.05, momentum=0.9, nesterov=True)), {}


@scenario
def adagrad() -> tuple[Net, dict[str, Any]]:
    """Its state is there before the first step."""
    return Net(lambda p: torch.optim.Adagrad(p, lr=0.05)), {}


@scenario
def group_rates() -> tuple[Net, dict[str, Any]]:
    class Groups(Net):
        def configure_optimizers(self) -> Any:
            rest = {"params": self.head.parameters(), "lr": 1e-3}
            groups: list[dict[str, Any]] = [{"params": self.body.parameters()}, rest]
            return torch.optim.AdamW(groups, lr=2e-2)

    return Groups(), {}


# Schedulers


@scenario
def schedulers() -> tuple[Net, dict[str, Any]]:
    class Scheduled(Net):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            step = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9), "interval": "step"}
            epoch = {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8), "interval": "epoch"}
            plateau = {
                "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
                "monitor": "val",
                "interval": "epoch",
            }
            return [optimizer], [step, epoch, plateau]

    return Scheduled(), {}


@scenario
def one_cycle() -> tuple[Net, dict[str, Any]]:
    class Cycled(Net):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
            steps = int(self.trainer.estimated_stepping_batches)
            cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=steps)
            return [optimizer], [{"scheduler": cycle, "interval": "step"}]

    return Cycled(), {}


@scenario
def warm_up_in_optimizer_step() -> tuple[Net, dict[str, Any]]:
    class WarmUp(Net):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * (self.trainer.global_step + 1)
            optimizer.step(closure=closure)

    return WarmUp(), {}


# Parameters


@scenario
def unused() -> tuple[Net, dict[str, Any]]:
    class Unused(Net):
        def __init__(self) -> None:
            super().__init__()
            self.never = nn.Parameter(torch.ones(5))
            self.sometimes = nn.Linear(INPUTS, 1)
            self.empty = nn.Parameter(torch.ones(0))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            if batch_idx % 3 == 0 and self.global_rank == batch_idx % 2:  # on one rank only
                loss = loss + self.sometimes(batch[0]).square().mean()
            return loss

    return Unused(), {"gradient_clip_val": 0.5}


@scenario
def frozen() -> tuple[Net, dict[str, Any]]:
    net = Net()
    net.body.weight.requires_grad_(False)
    return net, {}


@scenario
def tied() -> tuple[Net, dict[str, Any]]:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.back = nn.Linear(20, INPUTS)
            self.back.weight = nn.Parameter(self.body.weight.detach().t().clone())
            self.again = nn.Linear(INPUTS, 20)
            self.again.weight = self.body.weight

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.body(x))
            return self.head(torch.tanh(self.again(self.back(hidden))))

    return Tied(), {}


@scenario
def dtypes_and_shapes() -> tuple[Net, dict[str, Any]]:
    class Mixed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.shift = nn.Parameter(torch.zeros(1, dtype=torch.float64))
            self.turned = nn.Parameter(torch.randn(INPUTS, 20).t() / 10)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale + self.shift.float() + (x @ self.turned.t()).mean(1, keepdim=True)

    return Mixed(), {"gradient_clip_val": 0.5}


@scenario
def images_with_batch_norm() -> tuple[Net, dict[str, Any]]:
    class Images(Net):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1, bias=False)  # before BatchNorm its gradient is noise
            self.bn = nn.BatchNorm2d(4)
            self.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self.out = nn.Linear(16, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.bn(self.conv(x.view(-1, 3, 2, 2))).flatten(1))

    return Images(), {"accumulate_grad_batches": 2}


# Autograd


@scenario
def activation_checkpointing() -> tuple[Net, dict[str, Any]]:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = checkpoint(lambda y: torch.tanh(self.body(y)), x, use_reentrant=False)
            return self.head(hidden)

    return Checkpointed(), {}


@scenario
def gradient_penalty() -> tuple[Net, dict[str, Any]]:
    class Penalty(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x = batch[0].requires_grad_()
            (gradient,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
            return self.loss(batch) + 0.1 * gradient.square().mean()

    return Penalty(), {}


# Hooks that look at gradients or change weights


@scenario
def own_clipping() -> tuple[Net, dict[str, Any]]:
    class OwnClipping(Net):
        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            self.clip_gradients(optimizer, gradient_clip_val=0.4, gradient_clip_algorithm="norm")
            total = torch.stack([grad_of(p).norm() for p in self.parameters()]).norm()
            self.log("clipped_norm", total)

    return OwnClipping(), {}


@scenario
def logged_gradient_norm() -> tuple[Net, dict[str, Any]]:
    class Logged(Net):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.log_dict(grad_norm(self, norm_type=2))

    return Logged(), {}


@scenario
def changed_gradients() -> tuple[Net, dict[str, Any]]:
    class Changed(Net):
        def on_after_backward(self) -> None:
            for parameter in self.body.parameters():
                grad_of(parameter).mul_(0.5)
            self.head.bias.grad = torch.ones_like(self.head.bias)
            self.head.weight.grad = None

    return Changed(), {}


@scenario
def clamped_weights() -> tuple[Net, dict[str, Any]]:
    class Clamped(Net):
        def on_train_batch_end(self, *args: Any) -> None:
            for parameter in self.parameters():
                parameter.data.clamp_(-0.2, 0.2)

    return Clamped(), {}


@scenario
def counters_and_lists() -> tuple[Net, dict[str, Any]]:
    """What modules collect in plain attributes counts every batch once."""

    class Collects(Net):
        def __init__(self) -> None:
            super().__init__()
            self.batches = 0
            self.places: list[int] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.batches += 1
            self.places.append(batch_idx)
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self) -> None:
            self.log("batches", float(self.batches))
            self.log("places", float(len(self.places) * 100 + sum(self.places)))
            self.places.clear()

    return Collects(), {}


@scenario
def many_outputs() -> tuple[Net, dict[str, Any]]:
    """Lists and caches with many outputs, which weights depend on at the end of an epoch and in each batch."""

    class Collects(Net):
        def __init__(self) -> None:
            super().__init__()
            self.outputs_of_samples: list[dict[str, Any]] = []
            self.cache: dict[int, Tensor] = {}
            self.last: Any = None

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, _ = batch
            with torch.no_grad():
                found = torch.randn(40, 2) * self(x).mean()
            before = len(self.outputs_of_samples)
            self.outputs_of_samples += [{"value": row.clone(), "n": before + n} for n, row in enumerate(found)]
            self.cache.update({100 * batch_idx + n: row.sum() for n, row in enumerate(found)})
            if batch_idx > 2:
                self.outputs_of_samples[7]["value"].mul_(0.5)
                self.cache.pop(100 * (batch_idx - 3) + 5)
            self.last = self.outputs_of_samples[-batch_idx - 1]
            return super().training_step(batch, batch_idx) * (1 + self.last["value"].square().sum())

        def on_train_epoch_end(self) -> None:
            collected = torch.stack([each["value"] * each["n"] for each in self.outputs_of_samples]).mean()
            found = collected + torch.stack([*self.cache.values()]).mean()
            with torch.no_grad():
                self.head.bias.add_(self.trainer.strategy.reduce(found))
            self.outputs_of_samples.clear()

    return Collects(), {}


@scenario
def replaced_parts() -> tuple[Net, dict[str, Any]]:
    """Submodules, metrics and buffers that are other objects after every step, in the place of those before."""

    class Replaces(Net):
        table: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.drop, self.seen = nn.Dropout(0.1), MeanMetric()
            self.register_buffer("table", torch.zeros(70_000))  # too large to be compared by content

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.drop(torch.tanh(self.body(x)))) + self.table[:1]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.seen.update(loss.detach())
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen = MeanMetric()
            seen.update(self.seen.mean_value.clone())
            self.drop, self.seen, self.table = nn.Dropout(0.1), seen, self.table + 0.01

        def on_train_epoch_end(self) -> None:
            self.log("seen", self.seen.compute(), sync_dist=True)

    return Replaces(), {}


# Manual optimization


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@scenario
def manual() -> tuple[Net, dict[str, Any]]:
    class Once(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer = optimizer_of(self)
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            self.clip_gradients(cast("Any", optimizer), gradient_clip_val=0.3, gradient_clip_algorithm="norm")
            optimizer.step()
            return loss

    return Once(), {}


@scenario
def manual_accumulation() -> tuple[Net, dict[str, Any]]:
    class Accumulated(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = optimizer_of(self)
            self.manual_backward(self.loss(batch) / 3)
            if (batch_idx + 1) % 3 == 0:
                nn.utils.clip_grad_norm_(self.parameters(), 0.3)
                optimizer.step()
                optimizer.zero_grad()

    return Accumulated(), {}


@scenario
def two_paces() -> tuple[Net, dict[str, Any]]:
    class TwoPaces(Manual):
        """One optimizer makes a step each batch, the other every second: gradients wait for it."""

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.loss(batch))
            slow, fast = cast("list[Any]", self.optimizers())
            for optimizer in (slow, fast) if batch_idx % 2 else (fast,):
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.body.parameters(), 1e-2), torch.optim.RMSprop(self.head.parameters(), 1e-2)

    return TwoPaces(), {}


@scenario
def gradients_removed_now_and_then() -> tuple[Net, dict[str, Any]]:
    class Seldom(Manual):
        """Each step uses the sum of the gradients of some batches."""

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = optimizer_of(self)
            if batch_idx % 4 == 0:
                optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    return Seldom(), {}


class SharpnessAware(torch.optim.SGD):
    """Makes its updates with an optimizer of its own, outside of `step`."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.02)
        self.inner = torch.optim.SGD(self.param_groups, lr=0.02, momentum=0.9)
        self.inner.param_groups = self.param_groups

    def all(self) -> list[nn.Parameter]:
        return [each for group in self.param_groups for each in group["params"]]

    @torch.no_grad()
    def climb(self) -> None:
        norm = torch.stack([grad_of(each).norm() for each in self.all()]).norm()
        for each in self.all():
            self.inner.state[each]["before"] = each.clone()
            each.add_(grad_of(each), alpha=float(0.05 / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def descend(self) -> None:
        for each in self.all():
            each.copy_(self.inner.state[each].pop("before"))
        self.inner.step()
        self.zero_grad()


@scenario
def an_optimizer_in_an_optimizer() -> tuple[Net, dict[str, Any]]:
    class Sharp(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            self.manual_backward(self.loss(batch))
            optimizer.climb()
            self.manual_backward(self.loss(batch))
            optimizer.descend()

        def configure_optimizers(self) -> Any:
            return SharpnessAware(self.parameters())

    return Sharp(), {}


@scenario
def manual_closure() -> tuple[Net, dict[str, Any]]:
    class WithClosure(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = optimizer_of(self)

            def closure() -> Tensor:
                loss = self.loss(batch)
                optimizer.zero_grad()
                self.manual_backward(loss)
                return loss

            optimizer.step(closure=closure)

    return WithClosure(), {}


@scenario
def gan() -> tuple[Net, dict[str, Any]]:
    class Gan(Manual):
        def __init__(self) -> None:
            super().__init__()
            self.critic = nn.Linear(1, 8)
            self.verdict = nn.Linear(8, 1)

        def judge(self, x: Tensor) -> Tensor:
            return self.verdict(torch.relu(self.critic(x)))

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizers, schedulers = self.optimizers(), self.lr_schedulers()
            assert isinstance(optimizers, list)
            assert isinstance(schedulers, list)
            generator, critic = optimizers
            with generator.toggle_model():
                self.manual_backward(-self.judge(self(batch[0])).mean())
                generator.step()
                generator.zero_grad()
            for _ in range(2):  # more steps for one than for the other
                with critic.toggle_model():
                    loss = self.judge(self(batch[0]).detach()).mean() - self.judge(batch[1]).mean()
                    self.manual_backward(loss)
                    critic.step()
                    critic.zero_grad()
                for parameter in (*self.critic.parameters(), *self.verdict.parameters()):
                    parameter.data.clamp_(-0.3, 0.3)
            for scheduler in schedulers:
                assert isinstance(scheduler, torch.optim.lr_scheduler.StepLR)
                scheduler.step()
            self.log("critic", loss, sync_dist=True)

        def configure_optimizers(self) -> Any:
            generator = torch.optim.Adam([*self.body.parameters(), *self.head.parameters()], lr=1e-2)
            critic = torch.optim.RMSprop([*self.critic.parameters(), *self.verdict.parameters()], lr=1e-2)
            return [generator, critic], [torch.optim.lr_scheduler.StepLR(o, 3, 0.9) for o in (generator, critic)]

    return Gan(), {}


# Precision


@scenario
def double() -> tuple[Net, dict[str, Any]]:
    return Net(), {"precision": "64-true", "gradient_clip_val": 0.3}


@scenario
def bf16_mixed() -> tuple[Net, dict[str, Any]]:
    return Net(), {"precision": "bf16-mixed", "gradient_clip_val": 0.3}


@scenario
def bf16_true() -> tuple[Net, dict[str, Any]]:
    return Net(), {"precision": "bf16-true"}


class Overflows(Net):
    """One rank's loss overflows in the fourth batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        bad = batch_idx == 3 and self.global_rank == 1 and self.trainer.current_epoch == 0
        return loss * torch.inf if bad else loss


def scaler() -> dict[str, Any]:
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4))
    return {"plugins": [plugin]}


@scenario
def half_mixed() -> tuple[Net, dict[str, Any]]:
    return Overflows(), {**scaler(), "gradient_clip_val": 0.3}


@scenario
def half_mixed_seen() -> tuple[Net, dict[str, Any]]:
    class Seen(Overflows):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.log_dict(grad_norm(self, norm_type=2))

    return Seen(), {**scaler(), "gradient_clip_val": 0.3}


@scenario
def half_mixed_manual() -> tuple[Net, dict[str, Any]]:
    class Step(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = optimizer_of(self)
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss * torch.inf if batch_idx == 3 and self.global_rank == 1 else loss)
            optimizer.step()

    return Step(), scaler()


# Callbacks


@scenario
def averaged_weights() -> tuple[Net, dict[str, Any]]:
    return Net(), {"callbacks": [StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)], "max_epochs": 3}


@scenario
def averaged_weights_with_batch_norm() -> tuple[Net, dict[str, Any]]:
    net, _ = images_with_batch_norm()
    return net, {"callbacks": [StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)], "max_epochs": 3}


@scenario
def moving_average() -> tuple[Net, dict[str, Any]]:
    return Net(), {"callbacks": [WeightAveraging(avg_fn=get_ema_avg_fn(0.9))]}


@scenario
def early_stopping() -> tuple[Net, dict[str, Any]]:
    return Net(), {"callbacks": [EarlyStopping("val", patience=1, min_delta=10.0)], "max_epochs": 6}


@scenario
def best_checkpoint() -> tuple[Net, dict[str, Any]]:
    options: dict[str, Any] = {"save_top_k": 1, "monitor": "val", "save_last": True, "every_n_train_steps": 3}
    return Net(), {"callbacks": [ModelCheckpoint(dirpath=str(Path.cwd() / "best"), **options)]}


@scenario
def found_rate() -> tuple[Net, dict[str, Any]]:
    class WithRate(Net):
        def __init__(self) -> None:
            super().__init__()
            self.lr = 1e-3

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    return WithRate(), {"callbacks": [LearningRateFinder(num_training_steps=6, early_stop_threshold=None)]}


@scenario
def finetuning() -> tuple[Net, dict[str, Any]]:
    class Finetuned(Net):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = self.body

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)

    return Finetuned(), {"callbacks": [BackboneFinetuning(1, lambda epoch: 1.5, verbose=False)], "max_epochs": 3}


class Thaws(BackboneFinetuning):
    """As Lightning's pull request 21902 has it: what a former run has thawed is thawed before the fit begins."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        restarting = self._restarting
        super().on_fit_start(trainer, pl_module)
        named = dict(pl_module.named_parameters())
        for group in (each for groups in self._internal_optimizer_metadata.values() for each in groups):
            for name in group["params"] if restarting else ():
                named[name].requires_grad = True


@scenario
def thawed_at_the_start() -> tuple[Net, dict[str, Any]]:
    net, options = finetuning()
    return net, {**options, "callbacks": [Thaws(1, lambda epoch: 1.5, verbose=False)]}


@scenario
def added_group() -> tuple[Net, dict[str, Any]]:
    class Adds(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.head.parameters(), lr=1e-2)

        def on_train_epoch_start(self) -> None:
            if self.trainer.current_epoch == 1:
                optimizer_of(self).add_param_group({"params": list(self.body.parameters()), "lr": 1e-3})

    return Adds(), {}


# Data


class Stream(IterableDataset[Any]):
    """Every rank reads its own part."""

    def __iter__(self) -> Any:
        import torch.distributed as dist

        rank, world = dist.get_rank(), dist.get_world_size()
        x = torch.randn(64, INPUTS, generator=torch.Generator().manual_seed(9))
        for row in x[rank::world]:
            yield row, row.square().sum().reshape(1) / 8


@scenario
def stream() -> tuple[Net, dict[str, Any]]:
    class Streamed(Net):
        def train_dataloader(self) -> Any:
            return DataLoader(Stream(), batch_size=4)

    return Streamed(), {}


@scenario
def several_loaders() -> tuple[Net, dict[str, Any]]:
    class Several(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch["a"]) + self.loss(batch["b"])

        def train_dataloader(self) -> Any:
            return {"a": data(shuffle=True), "b": data(32, shuffle=True)}

    return Several(), {}


@scenario
def ends_early() -> tuple[Net, dict[str, Any]]:
    class Ends(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 4 else None

    return Ends(), {}


@scenario
def compiled() -> tuple[Net, dict[str, Any]]:
    class Silent(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch)  # `self.log` does not compile under Lightning 2.6 and torch 2.13, on one device too

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.loss(batch)

    return Silent(), {"compile": "aot_eager"}


HOOKS = (
    *("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_train_batch_end"),
)


def shrink(module: Any, *_: Any) -> None:
    """Write to weights in all ways: counted, uncounted, and by giving them other memory."""
    with torch.no_grad():
        module.body.weight.mul_(0.999)
        module.head.weight.data.mul_(0.999)
        module.body.bias.data = module.body.bias.data * 0.999


@scenario
def weights_written_in_hooks() -> tuple[Net, dict[str, Any]]:
    class Shrinks(Net):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            shrink(self)
            super().optimizer_step(*args, **kwargs)
            shrink(self)

    for hook in HOOKS:
        setattr(Shrinks, hook, shrink)
    return Shrinks(), {"accumulate_grad_batches": 2}


@scenario
def weights_written_in_callbacks() -> tuple[Net, dict[str, Any]]:
    calls: Any = {hook: lambda trainer, module, *_: shrink(module) for hook in HOOKS}
    return Net(), {"callbacks": [LambdaCallback(**calls)]}


@scenario
def gradients_seen_after_the_update() -> tuple[Net, dict[str, Any]]:
    class Sees(Net):
        def largest(self) -> float:
            return max(float(each.grad.abs().max()) for each in self.parameters() if each.grad is not None)

        def on_train_batch_end(self, *_: Any) -> None:
            with torch.no_grad():
                self.head.bias.add_(1e-3 * self.largest())

    return Sees(), {}


class Levels(TensorDataset):
    """A dataset that hooks change, while workers have copies of it."""

    def __init__(self) -> None:
        x = torch.randn(32, INPUTS, generator=torch.Generator().manual_seed(5))
        super().__init__(x, x.square().sum(1, keepdim=True) / 8)
        self.level, self.history = 1.0, [1.0]

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x * self.level, y * sum(self.history) / len(self.history)


def curriculum(workers: int, persistent: bool = False, **options: Any) -> tuple[Net, dict[str, Any]]:
    data = Levels()

    class Harder(Net):
        def train_dataloader(self) -> Any:
            return DataLoader(data, 4, num_workers=workers, persistent_workers=persistent)

        def on_train_epoch_start(self) -> None:
            self.harder(1.1)

        def on_train_batch_end(self, *_: Any) -> None:
            self.harder(1.01)

        def harder(self, factor: float) -> None:
            loader: Any = self.trainer.train_dataloader
            loader.dataset.level *= factor
            loader.dataset.history.append(loader.dataset.level)

    return Harder(), {"max_epochs": 3, **options}


@scenario
def curriculum_without_workers() -> tuple[Net, dict[str, Any]]:
    return curriculum(0)


@scenario
def curriculum_in_workers() -> tuple[Net, dict[str, Any]]:
    return curriculum(1)


@scenario
def curriculum_in_new_loaders() -> tuple[Net, dict[str, Any]]:
    return curriculum(2, reload_dataloaders_every_n_epochs=1)


@scenario
def curriculum_in_persistent_workers() -> tuple[Net, dict[str, Any]]:
    return curriculum(1, persistent=True)


class SeesGradients(Net):
    """Reads gradients in the hooks between an update and the next ``zero_grad``, and changes them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0.0

    def see(self) -> None:
        self.seen += 1e-3 * sum(float(each.grad.abs().sum()) for each in self.parameters() if each.grad is not None)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * (1 + self.seen)

    def on_train_batch_start(self, *_: Any) -> None:
        self.see()

    def on_before_zero_grad(self, *_: Any) -> None:
        self.see()

    def on_train_batch_end(self, *_: Any) -> None:
        self.see()
        for number, each in enumerate(self.parameters()):
            gradient = grad_of(each)
            if number == 0:
                gradient.data.mul_(2)
            elif number == 1:
                each.grad = gradient * 3
            elif number == 2 and self.trainer.global_step % 2:
                each.grad = None


@scenario
def gradients_seen_between_steps() -> tuple[Net, dict[str, Any]]:
    return SeesGradients(), {}


@scenario
def gradients_seen_between_steps_by_hand() -> tuple[Net, dict[str, Any]]:
    class ByHand(SeesGradients):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer = optimizer_of(self)
            loss = super().training_step(batch, batch_idx)
            self.see()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return loss

    return ByHand(), {}


@scenario
def gradients_seen_by_functions() -> tuple[Net, dict[str, Any]]:
    net, norms = Net(), []

    def see(trainer: Any, module: Any, *_: Any) -> None:
        norms.append(float(grad_norm(module, 2)["grad_2.0_norm_total"]))
        with torch.no_grad():
            module.head.bias.add_(1e-3 * sum(norms))

    return net, {"callbacks": [LambdaCallback(on_train_batch_end=see)], "gradient_clip_val": 0.5}


@scenario
def weights_normalised_in_the_step() -> tuple[Net, dict[str, Any]]:
    class Normalises(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.body.weight.data = nn.functional.normalize(self.body.weight.data, dim=1)
            self.head.weight.data.clamp_(-0.2, 0.2)
            return super().training_step(batch, batch_idx)

    return Normalises(), {}


@scenario
def warm_up_by_hand() -> tuple[Net, dict[str, Any]]:
    """Code before and after the step itself counts, draws random numbers, and sets the rate."""

    class WarmUp(Net):
        calls, history = 0, 0.0

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
            self.calls += 1
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * self.calls * (1 + float(torch.rand(())))
            super().optimizer_step(epoch, batch_idx, optimizer, closure)
            self.history += float(torch.rand(())) * self.calls

        def on_train_epoch_end(self) -> None:
            self.log("history", self.history, sync_dist=True)

    return WarmUp(), {}


@scenario
def codebook() -> tuple[Net, dict[str, Any]]:
    """Vector quantization: a large buffer that only ``.data`` writes to."""

    class Quantized(Net):
        embed: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("embed", torch.zeros(1024, 300))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch) * (1 + self.embed[batch_idx, 0])
            self.embed.data.mul_(0.9).add_(float(loss) * 0.01)
            return loss

    return Quantized(), {}


class MyLSTM(nn.LSTM):
    """As pytorch-forecasting has one."""


@scenario
def lists_of_parameters() -> tuple[Net, dict[str, Any]]:
    class Lists(Net):
        rnn: Any
        out: Any

        def __init__(self) -> None:
            super().__init__()
            self.rnn = MyLSTM(INPUTS, 5, batch_first=True)
            self.out = nn.Linear(5, 1)
            self.decayed = {"all": [self.body.weight, self.out.weight]}

        def forward(self, x: Tensor) -> Tensor:
            found, _ = self.rnn(x[:, None])
            return super().forward(x) + self.out(found[:, 0])

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) + 0.01 * sum(each.square().sum() for each in self.decayed["all"])

    return Lists(), {}


class Kept:
    """An object of the user's, with slots, references and generators."""

    __slots__ = ("draws", "numbers", "seen", "weight")

    def __init__(self, weight: nn.Parameter) -> None:
        self.weight, self.seen = weight, [0.0]
        self.draws, self.numbers = np.random.default_rng(3), random.Random(4)

    def draw(self) -> float:
        self.seen.append(float(self.draws.random()) + self.numbers.random() + float(self.weight.detach().sum()))
        return self.seen[-1]


@scenario
def state_of_all_kinds() -> tuple[Net, dict[str, Any]]:
    """Each kind has a part in the loss."""

    class Zoo(Net):
        body: Any
        holder: Any

        def __init__(self) -> None:
            super().__init__()
            self.kept = {"own": Kept(self.body.bias)}
            self.holder: Any = nn.Module()
            self.holder.count = 0
            self.order, self.table = OrderedDict(a=1.0, b=2.0), np.zeros(100_000)
            self.history: list[list[int]] = [[] for _ in range(1200)]
            self.bank = [torch.zeros(100_000), torch.zeros(3)]
            self.left = iter([float(n) for n in range(1000)])
            self.ema = [copy.deepcopy(self.head)]
            total = [0.0]

            def add(value: float) -> float:
                total[0] += value
                return total[0]

            self.add = add

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.holder.count += 1
            self.body.scale = getattr(self.body, "scale", 0.0) + 0.1
            self.order.move_to_end("a" if self.holder.count % 3 else "b")
            self.table[batch_idx] += 0.1
            self.history[batch_idx].append(1)
            self.bank[0].data[batch_idx] += 0.1
            self.bank[1].numpy()[0] += 0.1
            with torch.no_grad():
                self.ema[0].weight.data.lerp_(self.head.weight, 0.1)
            found = [self.kept["own"].draw(), self.holder.count, self.body.scale, next(iter(self.order.values()))]
            found += [self.table.sum(), sum(map(len, self.history)), float(self.bank[0].sum()), next(self.left)]
            found += [float(self.bank[1][0]), float(self.ema[0].weight.sum()), self.add(0.1)]
            return self.loss(batch) * (1 + 0.01 * float(sum(found)))

    return Zoo(), {"callbacks": [Paces()]}


class Paces(Callback):
    """Sets the rate by what it has seen, and has no ``state_dict``."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["loss"].detach()))
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 1e-3 * (1 + len(self.seen))


class GoesOn:
    """A loader whose epochs go on where the last one ended, as gluonts has one."""

    def __init__(self) -> None:
        self.batches, self.next = list(data(44)), 0

    def __iter__(self) -> Any:
        for _ in range(7):
            self.next += 1
            yield self.batches[self.next % len(self.batches)]


@scenario
def stream_that_goes_on() -> tuple[Net, dict[str, Any]]:
    class Streams(Net):
        def train_dataloader(self) -> Any:
            return GoesOn()

    return Streams(), {}


class Augmented(TensorDataset):
    """Draws from a generator of its own, in the process of the rank."""

    def __init__(self) -> None:
        super().__init__(*next(iter(data(64, 64))))
        self.draws, self.served = np.random.default_rng(3), [0]

    def __getitem__(self, index: Any) -> Any:
        self.served[0] += 1
        x, y = super().__getitem__(index)
        return x + 0.1 * float(self.draws.random()), y + 0.001 * self.served[0]


@scenario
def dataset_with_a_generator() -> tuple[Net, dict[str, Any]]:
    class Draws(Net):
        def train_dataloader(self) -> Any:
            return DataLoader(Augmented(), batch_size=4, shuffle=True)

    return Draws(), {}


@scenario
def steps_by_an_own_counter() -> tuple[Net, dict[str, Any]]:
    """When a tail is done again, the counter that has asked for the step is one ahead."""

    class Counts(Net):
        calls = 0

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
            self.calls += 1
            if self.calls % 3 == 1 or batch_idx % 2:
                super().optimizer_step(epoch, batch_idx, optimizer, closure)
            else:
                closure()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) * (1 + 0.01 * self.calls)

    return Counts(), {}


@scenario
def parts_of_weights() -> tuple[Net, dict[str, Any]]:
    """Attributes that lie in the memory of weights see each update."""

    class Parts(Net):
        def __init__(self) -> None:
            super().__init__()
            self.row = self.body.weight.data[1]
            self.by_name = {"all": self.head.weight.detach(), "turned": self.body.weight.data.t()}

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen = self.row.abs().sum() + self.by_name["all"].mean() + self.by_name["turned"][0].sum()
            return self.loss(batch) * (1 + 0.1 * seen)

        def on_train_end(self) -> None:
            self.head.bias.data += self.row.sum() + self.by_name["all"].sum()

    return Parts(), {}


def fit(
    name: str,
    strategy: Any,
    devices: int,
    callbacks: tuple[Callback, ...] = (),
    epochs: int | None = None,
    load: str | None = None,
    save: Path | None = None,
    accelerator: Any = "cpu",
) -> dict[str, Any]:
    """Trains and returns what came of it: tensors by name, and plain values."""
    L.seed_everything(11, verbose=False)
    module, options = SCENARIOS[name]()
    backend = options.pop("compile", None)
    defaults = {"max_epochs": 2, "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    extra = [*options.pop("callbacks", []), *callbacks]
    if not any(isinstance(callback, ModelCheckpoint) for callback in extra):
        defaults["enable_checkpointing"] = False
    options = {**defaults, **options, **({} if epochs is None else {"max_epochs": epochs})}
    trainer = L.Trainer(strategy=strategy, accelerator=accelerator, devices=devices, callbacks=extra, **options)
    given: Any = torch.compile(module, backend=backend) if backend else module
    trainer.fit(given, ckpt_path=load)
    if save is not None:
        trainer.save_checkpoint(save)
    plain = {
        "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
        "steps": trainer.global_step,
        "epoch": trainer.current_epoch,
        "rates": [[group["lr"] for group in optimizer.param_groups] for optimizer in trainer.optimizers],
        "precision": trainer.precision_plugin.state_dict(),
    }
    return {"tensors": {key: value.clone() for key, value in module.state_dict().items()}, "plain": plain}
