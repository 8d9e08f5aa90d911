"""Checkpoints: DDP goes on from ours and we from DDP's, across ranks, replicas, partitions and forms."""

import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy

from lightning_replica import ReplicaZeroStrategy
from lightning_replica.cli.main import main
from tests.support import world
from tests.support.bits import same
from tests.support.job import Case
from tests.support.ranks import free_port
from tests.trainer.both import different
from tests.trainer.resumes import Stage, run
from tests.trainer.scenarios import fit

# With two optimizers, without and with a loss scaler, with buffers, schedulers, state from the start.
NAMES = ("adagrad", "schedulers", "gan", "half_mixed_seen", "images_with_batch_norm", "dtypes_and_shapes")
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
    worlds: list[tuple[int, dict[str, Any]]] = [
        (4, {"replicas": 2, "partition": "parameter"}),
        (3, {"replicas": 1}),
        (1, {}),
    ]
    for devices, options in worlds:
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


def averages(case: Any, out: Path) -> None:
    """Under DDP and here, with checkpoints on the way; then from one of ours to the end."""
    torch.set_num_threads(1)
    rank = os.environ["LOCAL_RANK"]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(case.port), NODE_RANK="0", WORLD_SIZE="2")

    def saving(name: str) -> ModelCheckpoint:
        return ModelCheckpoint(out / name, "{step}", every_n_train_steps=5, save_top_k=-1)

    def ours() -> ReplicaZeroStrategy:
        return ReplicaZeroStrategy(bucket_bytes=512, state_dict_type="sharded")

    ended = {"ddp": fit("moving_average", DDPStrategy(), 2, (saving("ddp"),))}
    dist.destroy_process_group()
    ended["ours"] = fit("moving_average", ours(), 2, (saving("ours"),))
    ended["again"] = fit("moving_average", ours(), 2, load=str(out / "ours" / "step=5.ckpt"))
    torch.save(ended, out / f"ended{rank}.pt")


def test_averaged_weights_lie_where_ddp_has_them(tmp_path: Path) -> None:
    """The callback puts the average where weights are looked for, and the weights elsewhere."""
    case = Case(devices=2)
    case.port = free_port()  # type: ignore[attr-defined]
    outcome = world.run(case, tmp_path, target=averages)
    assert outcome.code == 0, outcome.logs
    for rank in range(2):
        ended = torch.load(tmp_path / f"ended{rank}.pt", weights_only=True)
        assert different(ended["ours"], ended["ddp"]) == []
        assert different(ended["again"], ended["ddp"]) == []
    main(["export", str(tmp_path / "ours" / "step=5.ckpt"), str(tmp_path / "one.ckpt")])
    one = torch.load(tmp_path / "one.ckpt", weights_only=True)
    ddp = torch.load(tmp_path / "ddp" / "step=5.ckpt", weights_only=True)
    assert not same(one["state_dict"], one["current_model_state"])
    for key in ("state_dict", "current_model_state", "averaging_state", "optimizer_states"):
        assert same(one[key], ddp[key]), key
    assert one.keys() - ddp.keys() == {"replica_zero"}


def saves_untrained(case: Case, out: Path) -> None:
    trainer = L.Trainer(strategy=ReplicaZeroStrategy(), accelerator="cpu", devices=2, logger=False)
    trainer.strategy.connect(BoringModel())
    trainer.save_checkpoint(out / "untrained.ckpt")


def test_a_module_that_has_not_been_trained_can_be_saved(tmp_path: Path) -> None:
    outcome = world.run(Case(devices=2), tmp_path, target=saves_untrained)
    assert outcome.code == 0, outcome.logs
    assert "layer.weight" in torch.load(tmp_path / "untrained.ckpt", weights_only=True)["state_dict"]
