"""What is damaged, of another model, or cut off in the middle: one clear error on every rank, and nothing is lost."""

import argparse
import os
import pickle
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_replica._compat.torch import read_dcp_metadata
from lightning_replica.checkpoint import verification
from lightning_replica.checkpoint.chunks import Chunk, ChunkReader
from lightning_replica.checkpoint.directory import CheckpointDirectory
from lightning_replica.checkpoint.location import locate
from lightning_replica.checkpoint.named_model import NamedModel
from lightning_replica.checkpoint.sharded import save_sharded
from lightning_replica.core.points import listen
from lightning_replica.errors import CheckpointError
from tests.checkpoint.disk import die_before
from tests.checkpoint.job import Run, World
from tests.support.ranks import run_ranks


def complaint(action: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as raised:
        action()
    return str(raised.value)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


DAMAGE: list[tuple[str, Callable[[Path], None], str]] = [
    ("__1_0.distcp", flip, "the checksum of __1_0.distcp differs from what was written"),
    ("__0_0.distcp", truncate, "__0_0.distcp has {} bytes, but was written with {}"),
    ("contents.pt", flip, "the checksum of contents.pt differs from what was written"),
    (".metadata", flip, "the checksum of .metadata differs from what was written"),
    ("manifest.json", Path.unlink, "it has no manifest.json"),
    ("plain.pt", Path.unlink, "plain.pt is missing"),
]


def damaged(rank: int, store: Any, root: str) -> dict[str, Any]:
    world = World(rank, store, 2)
    texts = {}
    for number, (name, damage, _) in enumerate(DAMAGE):
        path = Path(root) / str(number)
        run = world.run("AdamW", 2, "element")
        run.train(1)
        run.save(path)
        if rank == 0:
            damage(path / name)
        torch.distributed.barrier()
        loading = world.run("AdamW", 2, "element", fresh=True)
        before = loading.facts()
        texts[str(number)] = complaint(partial(loading.load, path))
        assert loading.facts() == before
    return texts


def test_damage_is_named_on_every_rank_and_nothing_is_changed(tmp_path: Path) -> None:
    first, second = run_ranks(2, damaged, str(tmp_path))
    assert first == second, first.get("raised")
    for number, (_, _, expected) in enumerate(DAMAGE):
        for part in expected.split("{}"):
            assert part in first[str(number)]


def other_models(rank: int, store: Any, root: str) -> dict[str, Any]:
    world, path = World(rank, store, 2), Path(root) / "step"
    run = world.run("AdamW", 1, "element")
    run.save(path)
    texts = {}

    def load(name: str, loading: Run) -> None:
        before = loading.facts()
        texts[name] = complaint(lambda: loading.load(path))
        assert loading.facts() == before

    other = world.run("AdamW", 1, "element").net
    other.first, other.second = nn.Linear(20, 8), nn.Linear(8, 20)
    other.tied = nn.Linear(8, 20)
    load("shapes", world.run("AdamW", 1, "element", net=other))
    load("dtype", world.run("bf16", 1, "element"))
    load("optimizers", world.run("two", 1, "element"))
    fewer = world.run("AdamW", 1, "element")
    del fewer.state.optimizers[0].optimizer.param_groups[1]
    load("groups", fewer)
    moved = world.run("AdamW", 1, "element")
    groups = moved.state.optimizers[0].optimizer.param_groups
    groups[1]["params"].append(groups[0]["params"].pop(0))
    load("moved", moved)
    return texts


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    texts, second = run_ranks(2, other_models, str(tmp_path))
    assert texts == second, texts.get("raised")
    assert texts["shapes"] == (
        "The checkpoint is of another model: 5 parameters or buffers differ: first.weight is float32 [7, 20] in the"
        " checkpoint and float32 [8, 20] here; first.bias is float32 [7] in the checkpoint and float32 [8] here;"
        " second.weight is float32 [20, 7] in the checkpoint and float32 [20, 8] here; and 2 more."
        " Load it into the model that wrote it."
    )
    assert "unused is float32 [4] in the checkpoint and bfloat16 [4] here" in texts["dtype"]
    assert "it has 1 optimizers, and this one has 2" in texts["optimizers"]
    assert "optimizer 0 (AdamW) has 2 in the checkpoint and 1 here" in texts["groups"]
    assert "group 0 of optimizer 0 (AdamW) differs in frozen" in texts["moved"]


def test_metadata_that_would_run_something_is_not_read() -> None:
    with pytest.raises(pickle.UnpicklingError, match=r"posix\.getcwd does not belong in the metadata"):
        read_dcp_metadata(pickle.dumps(os.getcwd))


def test_metadata_that_points_elsewhere_is_not_followed(tmp_path: Path) -> None:
    assert run_ranks(1, save_one, str(tmp_path)) == [{}]
    chunk = Chunk("model.scale", 1, 0, torch.empty(1))
    files = verification.verify(tmp_path / "step").files
    ChunkReader(tmp_path / "step", files).read([chunk])
    with pytest.raises(CheckpointError, match=r"refers to '__0_0.distcp', which its manifest does not list"):
        ChunkReader(tmp_path / "step", set(files) - {"__0_0.distcp"}).read([chunk])
    with pytest.raises(CheckpointError, match=r"does not hold tensor 'model.nothing'"):
        ChunkReader(tmp_path / "step", files).read([Chunk("model.nothing", 1, 0, torch.empty(1))])
    with pytest.raises(CheckpointError, match=r"holds only part of the tensor 'model.scale'"):
        ChunkReader(tmp_path / "step", files).read([Chunk("model.scale", 2, 0, torch.empty(2))])


def save_one(rank: int, store: Any, root: str) -> dict[str, Any]:
    World(rank, store, 1).run("AdamW", 1, "element").save(Path(root) / "step")
    return {}


def kill_at(rank: int, store: Any, root: str, victim: int, point: str) -> dict[str, Any]:
    """Saves, trains on, and loses ``victim`` in the middle of saving again."""
    world, path = World(rank, store, 3), locate(root) / "step"
    run = world.run("AdamW", 1, "element")
    run.train(2)
    run.save(path)
    saved = run.facts()
    store.set(f"saved {rank}", repr(saved))
    run.train(1)
    if rank == victim and point == "shard":
        die_before(4)  # in the middle of a write
    elif rank == victim:
        listen(lambda reached: os.kill(os.getpid(), signal.SIGKILL) if reached == point else None)
    try:
        run.save(path)
    except Exception as error:
        return {"error": type(error).__name__, "saved": saved}
    return {"error": None, "saved": saved}


def load_again(rank: int, store: Any, root: str) -> dict[str, Any]:
    world = World(rank, store, 3)
    run = world.run("AdamW", 1, "element", fresh=True)
    run.load(locate(root) / "step")
    loaded = run.facts()
    run.state.step = 2
    run.train(1)
    run.save(locate(root) / "step")
    return {"saved": loaded}


@pytest.mark.parametrize(("victim", "point"), [(1, "shard"), (1, "save"), (0, "save"), (0, "publish")])
def test_a_rank_killed_while_saving_costs_nothing_that_was_published(tmp_path: Path, victim: int, point: str) -> None:
    results = run_ranks(3, kill_at, str(tmp_path), victim, point)
    assert results[victim] == {"died": -signal.SIGKILL}
    survivors = [result for rank, result in enumerate(results) if rank != victim]
    assert all(result["error"] for result in survivors), survivors
    assert bool(list(tmp_path.glob("step.tmp-*"))) == (victim == 0), "who lives tidies up"
    loaded = run_ranks(3, load_again, str(tmp_path))
    for rank, result in enumerate(results):
        if rank != victim:
            assert loaded[rank]["saved"] == result["saved"], loaded[rank].get("raised")
    CheckpointDirectory(tmp_path).prepare()
    assert [file.name for file in tmp_path.iterdir()] == ["step"]


def bad_saves(rank: int, store: Any, root: str) -> dict[str, Any]:
    world, path = World(rank, store, 2), Path(root) / "step"
    run = world.run("AdamW", 1, "element")
    run.save(path)
    before = sorted((file.name, file.stat().st_mtime_ns) for file in path.iterdir())
    extras = {"frozen": run.net.frozen}

    def named(extra_tensors: dict[str, torch.Tensor]) -> NamedModel:
        return NamedModel(run.names, extra_tensors)

    texts = {
        "plain": complaint(
            lambda: save_sharded(path, run.state, named(extras), {"x": [1, {"y": argparse.Namespace(z=1)}]})
        ),
        "missing": complaint(lambda: save_sharded(path, run.state, named({}), {})),
        "twice": complaint(lambda: save_sharded(path, run.state, named({"scale": run.net.scale}), {})),
    }
    if rank == 1:
        run.state.optimizers[0].pieces.pop()
    texts["hole"] = complaint(lambda: save_sharded(path, run.state, named(extras), {}))
    assert sorted((file.name, file.stat().st_mtime_ns) for file in path.iterdir()) == before
    return texts


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    texts, second = run_ranks(2, bad_saves, str(tmp_path))
    assert texts == second, texts.get("raised")
    assert texts["plain"] == (
        "rank 0: A checkpoint holds only tensors and plain data, but in the state beside the weights,"
        " checkpoint['x'][1]['y'] is a argparse.Namespace. Save numbers, strings, lists, dicts and tensors instead."
    )
    assert texts["missing"] == "frozen: neither trained nor among the extra tensors."
    assert texts["twice"].startswith("scale is trained, so it is already part of the checkpoint")
    hole = "is not written, because it would not be whole: .metadata does not list the tensor 'model.unused'."
    assert texts["hole"] == f"rank 0: {tmp_path / 'step'} {hole}"
