"""Fits that save and fits that go on, one after the other in rank processes."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

from lightning_replica import ReplicaZeroStrategy
from tests.support import world
from tests.support.job import Case
from tests.support.ranks import free_port
from tests.trainer import both
from tests.trainer.scenarios import SCENARIOS, fit


@dataclass
class Stage:
    """One fit: from a checkpoint, perhaps, to an epoch, and perhaps into another checkpoint."""

    epochs: int
    load: str = ""
    save: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    only_validate: bool = False


@dataclass
class Resumes(Case):
    """Stages of one strategy, done for each scenario."""

    strategy: str = "ours"
    names: tuple[str, ...] = ()
    stages: dict[str, Stage] = field(default_factory=dict)
    port: int = 0


Results = dict[tuple[str, str], Any]


def run(out: Path, strategy: str, names: tuple[str, ...], stages: dict[str, Stage], devices: int = 2) -> Results:
    """Results of rank 0 by stage and scenario; all ranks must agree."""
    case = Resumes(devices=devices, strategy=strategy, names=names, stages=stages, port=free_port())
    outcome = world.run(case, out, target=work)
    assert outcome.code == 0, outcome.logs
    found = {}
    for stage in stages:
        for name in names:
            ranks = [torch.load(out / f"{stage}.{name}.{rank}.pt", weights_only=True) for rank in range(devices)]
            assert all(both.different(rank, ranks[0]) == [] for rank in ranks[1:]), (stage, name)
            found[stage, name] = ranks[0]
    return found


def work(case: Resumes, out: Path) -> None:
    torch.set_num_threads(1)
    rank = os.environ["LOCAL_RANK"]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(case.port), NODE_RANK="0", WORLD_SIZE=str(case.devices))
    place = out / f"cwd{rank}"
    place.mkdir(exist_ok=True)
    os.chdir(place)
    for label, stage in case.stages.items():
        for name in case.names:
            result = _stage(case, name, stage, out)
            torch.save(result, out / f"{label}.{name}.{rank}.pt")
    if case.strategy == "ddp":
        dist.destroy_process_group()


def _stage(case: Resumes, name: str, stage: Stage, out: Path) -> dict[str, Any]:
    strategy: Any = (
        DDPStrategy(find_unused_parameters=name in both.FIND_UNUSED)
        if case.strategy == "ddp"
        else ReplicaZeroStrategy(bucket_bytes=512, **stage.options)
    )
    load = str(out / f"{stage.load}.{name}") if stage.load else None
    if stage.only_validate:
        module, _ = SCENARIOS[name]()
        trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=case.devices, logger=False)
        metrics = trainer.validate(module, ckpt_path=load, verbose=False)
        return {"tensors": dict(module.state_dict()), "plain": {"metrics": dict(metrics[0])}}
    save = out / f"{stage.save}.{name}" if stage.save else None
    return fit(name, strategy, case.devices, epochs=stage.epochs, load=load, save=save)
