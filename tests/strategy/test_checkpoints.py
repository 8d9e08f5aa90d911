"""Checkpoints: DDP goes on from ours and we from DDP's, across ranks, replicas, partitions and forms."""

from pathlib import Path
from typing import Any

import torch

from lightning_replica.cli.main import main
from tests.strategy.both import different
from tests.strategy.resumes import Stage, run
from tests.support.bits import same

# With two optimizers, without and with a loss scaler, with buffers, schedulers, state from the start.
NAMES = ("plain", "adagrad", "schedulers", "gan", "half_mixed_seen", "images_with_batch_norm", "dtypes_and_shapes")
CLIPPED = ("dtypes_and_shapes", "half_mixed_seen")


def close(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(float((a["tensors"][k] - v).abs().max()) < 1e-6 for k, v in b["tensors"].items())


def test_ddp_and_replica_zero_go_on_from_each_other(tmp_path: Path) -> None:
    ddp = run(tmp_path, "ddp", NAMES, {"ddp4": Stage(4), "ddp2": Stage(2, save="ddp2.ckpt")})
    stages = {
        "full2": Stage(2, save="full2.ckpt"),
        "sharded2": Stage(2, save="sharded2", options={"state_dict_type": "sharded", "partition": "parameter"}),
        "ours4": Stage(4),
        "from_ddp": Stage(4, load="ddp2.ckpt"),
        "from_full": Stage(4, load="full2.ckpt"),
        "from_sharded": Stage(4, load="sharded2"),
        "validated": Stage(0, load="sharded2", only_validate=True),
    }
    ours = run(tmp_path, "ours", NAMES, stages)
    for name in NAMES:
        main(["export", str(tmp_path / f"sharded2.{name}"), str(tmp_path / f"exported2.ckpt.{name}")])
    stages = {"from_ours": Stage(4, load="full2.ckpt"), "from_export": Stage(4, load="exported2.ckpt")}
    back = run(tmp_path, "ddp", NAMES, stages)
    for name in NAMES:
        oracle = ddp["ddp4", name]
        results = {**ours, **back}
        for stage in ("ours4", "from_ddp", "from_full", "from_sharded", "from_ours", "from_export"):
            got = results[stage, name]
            assert close(got, oracle) if name in CLIPPED else different(got, oracle) == [], (stage, name)
        at_two = ours["full2", name]
        validated = ours["validated", name]
        differs = different({**validated, "plain": at_two["plain"]}, at_two)
        assert close(validated, at_two) if name in CLIPPED else differs == [], name


def test_checkpoints_move_between_worlds(tmp_path: Path) -> None:
    names = ("plain", "gan", "bf16_true", "frozen")
    small = {
        "full": Stage(2, save="full.ckpt"),
        "sharded": Stage(2, save="sharded", options={"state_dict_type": "sharded"}),
    }
    run(tmp_path, "ours", names, small)
    for devices, options in [(4, {"replicas": 2, "partition": "parameter"}), (3, {"replicas": 1}), (1, {})]:
        again = {
            "full_again": Stage(2, load="full.ckpt", save="full_again.ckpt", options=options),
            "sharded_again": Stage(2, load="sharded", save="sharded_again.ckpt", options=options),
        }
        run(tmp_path, "ours", names, again, devices)
        for name in names:
            first = torch.load(tmp_path / f"full.ckpt.{name}", weights_only=True)
            for stage in again:
                second = torch.load(tmp_path / f"{stage}.ckpt.{name}", weights_only=True)
                assert same(first["replica_zero"]["main"], second["replica_zero"]["main"]), (devices, stage, name)
                for key in ("state_dict", "optimizer_states", "lr_schedulers"):
                    assert same(first[key], second[key]), (devices, stage, name, key)
