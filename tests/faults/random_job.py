"""A training that a seed makes: its layers, what its objects hold, which hooks it has, and what these change."""

import array
import collections
import copy
import hashlib
import io
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_replica import DyingGaspCheckpoint
from tests.state.test_random_objects import Builder, Own, OwnList, Slotted, change
from tests.support import job
from tests.support.accelerators import accelerator
from tests.support.job import Case, Faults
from tests.support.trainers import state_of

WIDTH, LAYERS = 6, 4
HOOKS = (
    *("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad"),
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end"),
    *("on_train_epoch_end", "on_validation_start", "on_validation_epoch_start", "on_validation_batch_start"),
    *("on_validation_batch_end", "on_validation_epoch_end", "on_validation_end", "on_train_end"),
    *("on_before_batch_transfer", "on_after_batch_transfer"),
)
OF_MODULE = {"on_before_batch_transfer", "on_after_batch_transfer"}


class Digest:
    """A hash of objects, and of which of them are the same."""

    def __init__(self) -> None:
        self._hash, self._met = hashlib.sha256(), dict[int, int]()

    def add(self, value: Any) -> None:
        if not isinstance(value, (int, float, complex, str, bytes, tuple, type(None))):
            known = len(self._met)
            if self._met.setdefault(id(value), known) != known:
                self._write("same as", self._met[id(value)])
                return
        self._write(type(value).__name__)
        for part in self._parts(value):
            self.add(part)

    def _write(self, *values: Any) -> None:
        self._hash.update(repr(values).encode())

    def _parts(self, value: Any) -> Iterator[Any]:
        if isinstance(value, Tensor):
            self._write(value.dtype, value.shape, value.detach().numpy().tobytes())
        elif isinstance(value, np.ndarray):
            self._write(value.dtype, value.shape, value.tobytes())
        elif isinstance(value, (bytearray, array.array)):
            self._write(bytes(value))
        elif isinstance(value, io.BytesIO):
            self._write(value.getvalue(), value.tell())
        elif isinstance(value, random.Random):
            self._write(value.getstate())
        elif isinstance(value, set):
            self._write(sorted(value))
        elif isinstance(value, type(iter([]))):
            yield from copy.copy(value)
        elif isinstance(value, dict):
            for key, item in value.items():
                self._write(key)
                yield item
        elif isinstance(value, (list, tuple, collections.deque)):
            yield from value
            if isinstance(value, OwnList):
                self._write(sorted(vars(value).items()))
        elif isinstance(value, Slotted):
            yield from (value.a, value.b)
        elif isinstance(value, Own):
            yield from vars(value).items()
        else:
            assert isinstance(value, (int, float, complex, str, bytes, type(None))), type(value)
            self._write(value)

    def hex(self) -> str:
        return self._hash.hexdigest()

    def number(self) -> float:
        return int(self.hex()[:8], 16) / 2**32


class MyLSTM(nn.LSTM):
    """Keeps its weights in attributes, too."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.mine = list(self.parameters())

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        found: Tensor = super().forward(x[None])[0][0]
        return found + self.mine[1].mean()


class Quantized(nn.Module):
    """A codebook that follows its inputs."""

    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x.detach(), self.codes).argmin(1)
        self.codes.data[nearest] = self.codes[nearest] * 0.9 + 0.1 * x.detach()
        return x + self.codes[nearest]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.there, self.back = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.back.weight = self.there.weight

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.back(torch.tanh(self.there(x)))
        return made


class Remembers(nn.Module):
    """Adds what it saw last."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last, self.calls = nn.Linear(WIDTH, WIDTH), collections.deque[Tensor](maxlen=2), 0

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x)
        self.calls += 1
        for before in self.last:
            made = made + before.mean() / self.calls
        self.last.append(x.detach())
        return made


KINDS: tuple[Callable[[], nn.Module], ...] = (
    lambda: nn.Linear(WIDTH, WIDTH),
    lambda: nn.BatchNorm1d(WIDTH),
    lambda: nn.Dropout(0.2),
    MyLSTM,
    Quantized,
    Tied,
    Remembers,
    lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
)


class Random(L.LightningModule):
    """Layers and objects that a seed has chosen; its loss depends on what its objects hold."""

    def __init__(self, seed: int, faults: Faults) -> None:
        super().__init__()
        dice, builder = random.Random(seed), Builder(seed)
        self.seed, self._faults = seed, [faults]
        self.net = nn.Sequential(*[dice.choice(KINDS)() for _ in range(LAYERS)], nn.Linear(WIDTH, 1))
        self.held, self.net[0].held, self.also = builder.value(), builder.value(), builder.value()
        self.optimizer_class = dice.choice([torch.optim.AdamW, torch.optim.SGD])

    def number(self) -> float:
        digest = Digest()
        for value in (self.held, self.net[0].held, self.also):
            digest.add(value)
        return digest.number()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        act(self, "training_step", batch_idx)
        factor = 1 + self.number() / 10
        self._faults[0].reach("forward", self.trainer.global_step)
        loss = (self.net(batch[0]) * factor).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.net(batch[0]).mean() * self.number())

    def configure_optimizers(self) -> Any:
        return self.optimizer_class(self.parameters(), lr=0.02)


class Hook(L.Callback):
    """Has objects of its own."""

    def __init__(self, seed: int) -> None:
        self.seed, self.held = seed, Builder(seed + 1).value()


def act(owner: Any, hook: str, *more: Any) -> None:
    """Change, in a hook, what the seed says: objects, a weight, a buffer, which of them an attribute refers to."""
    module = owner if isinstance(owner, Random) else cast("Any", more[1])
    step = -1 if hook == "on_train_start" else module.trainer.global_step  # a run that resumes calls it, too
    seed = f"{owner.seed} {hook} {type(owner).__name__} {step} {module.trainer.current_epoch}"
    dice = random.Random(seed)
    change(owner.held, dice, Builder(dice.randrange(1000)), set())
    choice = dice.randrange(5)
    if choice == 0:
        owner.held = [owner.held, module.also] if dice.random() < 0.3 else Builder(dice.randrange(1000)).value()
    elif choice == 1:
        module.also, module.held = module.held, module.also
    elif hook == "on_train_start":
        pass  # what it wrote to weights and buffers, a run that resumes would write once more
    elif choice == 2 and "validation" not in hook and "transfer" not in hook and hook != "training_step":
        dice.choice([*module.net.parameters()]).data.mul_(0.99)
    elif choice == 3:
        for buffer in module.net.buffers():
            if buffer.is_floating_point():
                buffer.data.mul_(0.98)


def hooks_of(seed: int, base: type, odds: float) -> dict[str, Any]:
    """Hooks that the seed chooses, by name."""
    dice = random.Random(f"{seed} {base.__name__}")
    found: dict[str, Any] = {}

    def made(name: str) -> Any:
        def hook(self: Any, *arguments: Any) -> Any:
            act(self, name, *arguments)
            return arguments[0] if name in OF_MODULE else None

        return hook

    for name in HOOKS:
        if dice.random() < odds and (name not in OF_MODULE or base is Random):
            found[name] = made(name)
    return found


def run(case: Any, out: Path) -> None:
    """Trains in one rank and writes down what came of it."""
    torch.set_num_threads(1)
    L.seed_everything(case.seed, verbose=False)
    dice = random.Random(case.seed)
    odds = dice.choice([0.0, 0.15, 0.4])
    faults = Faults(case, out)
    module: Random = type("Module", (Random,), hooks_of(case.seed, Random, odds))(case.seed, faults)
    hook: Hook = type("OwnHook", (Hook,), hooks_of(case.seed, Hook, odds))(case.seed)
    strategy = job.strategy_with_default_guard(case)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator=accelerator(),
        devices=case.devices,
        max_epochs=2,
        accumulate_grad_batches=dice.choice([1, 1, 2]),
        val_check_interval=dice.choice([2, 4]),
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
        callbacks=[hook, faults, *([DyingGaspCheckpoint(out / "gasp", case.grace_s)] if case.gasp else ())],
    )
    x = torch.randn(40, WIDTH)
    train, val = (DataLoader(TensorDataset(x), 5, shuffle=shuffle) for shuffle in (True, False))
    trainer.fit(module, train, val, ckpt_path=case.load or None)
    held = Digest()
    held.add(hook.held)
    result = {
        "weights": job._digest(*module.parameters(), *module.buffers()),
        "optimizer": job.digest_of_optimizers(state_of(strategy)),
        "random": [job._digest(torch.get_rng_state()), repr(random.getstate())],
        "held": [module.number(), held.hex()],
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "progress": [trainer.global_step, trainer.current_epoch],
    }
    (out / f"rank{trainer.global_rank}.json").write_text(json.dumps(result))


def case_of(seed: int, **options: Any) -> Case:
    case = Case(devices=2, **options)
    case.seed = seed  # type: ignore[attr-defined]
    return case
