"""Runs scenarios under Lightning's DDP and under `replica_zero`, in the same rank processes."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

from lightning_replica import ReplicaZeroStrategy
from tests.support import world
from tests.support.job import Case
from tests.support.ranks import free_port
from tests.trainer import scenarios


def compare(options: dict[str, list[dict[str, Any]]], out: Path, devices: int = 2) -> dict[str, tuple[Any, list[Any]]]:
    """For each scenario, what rank 0 ended with: under DDP, and under replica_zero with each of its options.

    All ranks must agree.
    """
    case = Case(devices=devices)
    case.options, case.port = options, free_port()  # type: ignore[attr-defined]
    outcome = world.run(case, out, target=both)
    assert outcome.code == 0, outcome.logs
    assert "corrupted" not in outcome.logs
    assert "recovered" not in outcome.logs
    found = {}
    for name, each in options.items():
        ddp, *ours = (
            [torch.load(out / f"{name}.{kind}.{rank}.pt", weights_only=True) for rank in range(devices)]
            for kind in ("ddp", *range(len(each)))
        )
        for first, *others in ours:
            for other in others:
                assert different(other, first) == [], f"{name}: ranks differ in {different(other, first)}"
        found[name] = (ddp[0], [first for first, *_ in ours])
    return found


def different(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Names of tensors and plain values that are not the same, to the last bit."""
    assert a["tensors"].keys() == b["tensors"].keys()
    tensors = [key for key, value in a["tensors"].items() if not torch.equal(value, b["tensors"][key])]
    plain = [key for key, value in a["plain"].items() if value != b["plain"][key]]
    return tensors + plain


def both(case: Any, out: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["LOCAL_RANK"])
    place = out / f"cwd{rank}"
    place.mkdir()
    os.chdir(place)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(case.port), NODE_RANK="0", WORLD_SIZE=str(case.devices))
    for name in case.options:
        result = scenarios.fit(name, DDPStrategy(find_unused_parameters=name in FIND_UNUSED), case.devices)
        torch.save(result, out / f"{name}.ddp.{rank}.pt")
    dist.destroy_process_group()
    for name in case.options:
        for number, options in enumerate(case.options[name]):
            torch._dynamo.reset()
            # The guard sees everything; no scenario is a reason for an alarm.
            strategy = ReplicaZeroStrategy(**{"bucket_bytes": 512, "guard": "full", **options})
            torch.save(scenarios.fit(name, strategy, case.devices), out / f"{name}.{number}.{rank}.pt")


FIND_UNUSED = {
    "unused",
    "gan",
    "finetuning",
    "added_group",
    "averaged_weights_with_batch_norm",
    "images_with_batch_norm",
}
