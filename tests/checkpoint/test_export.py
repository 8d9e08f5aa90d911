"""What is exported is what plain torch saves, and plain Lightning goes on from it."""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_replica.checkpoint.export import export
from lightning_replica.errors import CheckpointError
from tests.checkpoint.job import CASES, Net, World
from tests.support.ranks import run_ranks

EXPORTED = ["AdamW", "SGD", "Adagrad", "two", "bf16", "Adafactor"]


def train_and_save(rank: int, store: Any, root: str) -> dict[str, Any]:
    """Trains under every partition, saves, and keeps the weights after one more step."""
    world = World(rank, store, 2)
    for case in EXPORTED:
        for partition in CASES[case].partitions:
            run = world.run(case, 1, partition)
            run.train(2)
            run.save(Path(root) / f"{case} {partition}")
            if rank == 0:
                torch.save(run.net.state_dict(), Path(root) / f"{case} {partition}.weights")
            run.train(1)
            if rank == 0:
                torch.save(run.net.state_dict(), Path(root) / f"{case} {partition}.after")
            run.close()
    return {}


def step_unsharded(net: Net, optimizers: list[torch.optim.Optimizer], dtype: torch.dtype) -> None:
    """What the two ranks do in their third step."""
    for rank in range(2):
        torch.manual_seed(200 + rank)
        mode = net.norm.momentum
        if rank == 1:
            net.norm.momentum = 0.0  # buffers are rank 0's
        (net(torch.randn(6, 3, 4, 4, dtype=dtype)).square().mean() / 2).backward()
        net.norm.momentum = mode
    assert net.norm.num_batches_tracked is not None
    net.norm.num_batches_tracked.sub_(1)
    net.empty.grad = None  # torch's Adafactor divides by the number of elements
    for optimizer in optimizers:
        optimizer.step()


def test_plain_torch_goes_on_from_an_export(tmp_path: Path) -> None:
    for result in run_ranks(2, train_and_save, str(tmp_path)):
        assert result == {}, result["raised"]
    for case in EXPORTED:
        for partition in CASES[case].partitions:
            name = tmp_path / f"{case} {partition}"
            export(name, tmp_path / "one.ckpt")
            checkpoint = torch.load(tmp_path / "one.ckpt", weights_only=True)
            assert checkpoint["epoch"] == 3
            weights = torch.load(f"{name}.weights", weights_only=True)
            assert checkpoint["state_dict"].keys() == weights.keys()
            for key, weight in weights.items():
                assert torch.equal(checkpoint["state_dict"][key], weight), (case, key)
                assert checkpoint["state_dict"][key].stride() == weight.stride()
            net = Net().to(CASES[case].dtype)
            optimizers = CASES[case].optimizers(net)
            net.load_state_dict(checkpoint["state_dict"])
            for optimizer, state in zip(optimizers, checkpoint["optimizer_states"], strict=True):
                optimizer.load_state_dict(state)
            step_unsharded(net, optimizers, CASES[case].dtype)
            if case != "bf16":  # there plain torch has no main parameters, and rounds otherwise
                after = torch.load(f"{name}.after", weights_only=True)
                for key, weight in net.state_dict().items():
                    torch.testing.assert_close(
                        weight, after[key], rtol=1e-6, atol=1e-6, msg=f"{case} {partition} {key}"
                    )
    assert not (tmp_path / "one.ckpt.tmp").exists()


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    assert run_ranks(2, train_one, str(tmp_path)) == [{}, {}]
    file = tmp_path / "step" / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp has \d+ bytes, but was written with \d+"):
        export(tmp_path / "step", tmp_path / "one.ckpt")
    assert not (tmp_path / "one.ckpt").exists()


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    """As on a full disk: the error says which, the former file stays, and nothing is left beside it."""
    assert run_ranks(2, train_one, str(tmp_path)) == [{}, {}]
    file = tmp_path / "one.ckpt"
    file.write_text("the former one")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=f"{file} could not be written: "):
            export(tmp_path / "step", file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.read_text() == "the former one"
    assert not (tmp_path / "one.ckpt.tmp").exists()


def train_one(rank: int, store: Any, root: str) -> dict[str, Any]:
    run = World(rank, store, 2).run("SGD", 1, "element")
    run.save(Path(root) / "step")
    return {}
