"""Loading of one division of a model into another, in one process; what is refused, and what is said of it."""

from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_replica.checkpoint import resharding
from lightning_replica.checkpoint.barrier import Barrier
from lightning_replica.checkpoint.boxes import Box, Whole
from lightning_replica.checkpoint.chunks import ChunkReader
from lightning_replica.checkpoint.contents import Contents, OptimizerInfo, StateInfo, TensorInfo, read_contents
from lightning_replica.checkpoint.export import export
from lightning_replica.checkpoint.location import locate
from lightning_replica.checkpoint.manifest import Provenance
from lightning_replica.checkpoint.named_model import NamedModel
from lightning_replica.checkpoint.sharded import load_sharded, stage, write
from lightning_replica.checkpoint.sources import Sources
from lightning_replica.checkpoint.torch_dist import export_megatron
from lightning_replica.checkpoint.verification import check, published
from lightning_replica.core.grid import Grid
from lightning_replica.errors import CheckpointError
from tests.checkpoint.job import Run


class Rows:
    """A rank that has some rows of a table, transposed, and a buffer of its own."""

    def __init__(
        self, first: int, rows: int, of: int, padded: bool = False, part: str = "part", key: str = "t"
    ) -> None:
        one = nn.Linear(rows, 3, bias=False)
        net = nn.Sequential(OrderedDict(one=one))
        self.weight, self.seen = one.weight, torch.zeros(2)
        net.register_buffer("seen", self.seen)
        self.run = Run("SGD", 0, Grid.of(1, 1), "element", net=net, bucket_bytes=64)
        self.part = part
        self.names, self.extras = [f"{part}.one.weight"], {f"{part}.seen": self.seen}
        box = Box(key, (of, 3), (first, 0), (rows, 3), 0, (1, rows), padded)
        self.whole = Whole({self.names[0]: [box]}, ["t._extra_state/shard_0_1"])
        (self.optimizer,) = self.run.state.optimizers

    def put(self, value: torch.Tensor) -> "Rows":
        """Gives the rank its values, transposed."""
        with torch.no_grad():
            self.weight.copy_(value.T)
        self.seen.fill_(5)
        flat = value.T.reshape(-1) * 2
        for piece in self.optimizer.pieces:
            part = flat[piece.start : piece.start + piece.parameter.numel()].view(piece.parameter.shape)
            self.optimizer.optimizer.state[piece.parameter]["momentum_buffer"] = part.clone()
        return self

    def momentum(self) -> torch.Tensor:
        state = self.optimizer.optimizer.state
        flat = torch.cat([state[p.parameter]["momentum_buffer"].reshape(-1) for p in self.optimizer.pieces])
        return flat.view(self.weight.shape).T

    def named(self) -> NamedModel:
        return NamedModel(self.names, self.extras, parts=(self.part,), whole=self.whole)

    def save(self, path: Path) -> Path:
        barrier = Barrier(None)
        write(stage(locate(path), self.run.state, self.named(), {}, barrier, provenance=Provenance(7)), barrier)
        return path

    def load(self, path: Path) -> "Rows":
        load_sharded(path, self.run.state, self.named())
        return self


TABLE = torch.arange(24.0).view(8, 3) + 1


@pytest.mark.parametrize("batch_bytes", [1, 1 << 28])
def test_some_rows_of_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_bytes: int) -> None:
    """Of the first and of the last; a buffer is taken by its bare name. However much is read at once."""
    monkeypatch.setattr(resharding, "_BATCH_BYTES", batch_bytes)
    saved = Rows(0, 8, 8).put(TABLE).save(tmp_path / "saved")
    for first, rows in ((0, 3), (5, 3), (2, 4), (0, 8)):
        rank = Rows(first, rows, 8, part=f"other_{first}").load(saved)
        assert torch.equal(rank.weight.T, TABLE[first : first + rows])
        assert torch.equal(rank.momentum(), 2 * TABLE[first : first + rows])
        assert rank.seen.tolist() == [5, 5]


def test_padding(tmp_path: Path) -> None:
    """What is stored of padding beyond the rank's is left; what is not stored stays, with state of zero."""
    saved = Rows(0, 8, 8, padded=True).put(TABLE).save(tmp_path / "saved")
    fewer = Rows(0, 6, 6, padded=True).load(saved)
    assert torch.equal(fewer.weight.T, TABLE[:6])
    more = Rows(0, 10, 10, padded=True)
    before = more.weight.detach().T.clone()
    more.load(saved)
    assert torch.equal(more.weight.T, torch.cat([TABLE, before[8:]]))
    assert torch.equal(more.momentum(), torch.cat([2 * TABLE, torch.zeros(2, 3)]))
    beyond = Rows(8, 2, 10, padded=True, part="beyond")
    before = beyond.weight.detach().clone()
    assert torch.equal(beyond.load(saved).weight, before)
    assert torch.equal(beyond.momentum(), torch.zeros(2, 3))


def test_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    saved = Rows(0, 8, 8).put(TABLE).save(tmp_path / "saved")
    for rank, said in (
        (
            Rows(0, 8, 9, part="other"),
            r"other.one.weight is a part of t, which is \[8, 3\] in the .* and \[9, 3\] here",
        ),
        (Rows(0, 8, 8, part="other", key="u"), r"other.one.weight \(u of the whole model\) is not in the checkpoint"),
        (Rows(0, 8, 9), "is of another model"),
    ):
        before = rank.weight.detach().clone()
        with pytest.raises(CheckpointError, match=said):
            rank.load(saved)
        assert torch.equal(rank.weight, before)


def test_a_hole(tmp_path: Path) -> None:
    saved = Rows(0, 5, 8).put(TABLE[:5]).save(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"other.one.weight lacks 9 elements of t in the checkpoint"):
        Rows(0, 8, 8, part="other").load(saved)
    with pytest.raises(CheckpointError, match="lacks 9 elements of 't', a tensor of the whole model"):
        export_megatron(saved, tmp_path / "out")


def test_other_param_groups(tmp_path: Path) -> None:
    rank = Rows(0, 8, 8).put(TABLE)
    groups = rank.optimizer.optimizer.param_groups
    groups.append({**groups[0], "params": []})
    saved = rank.save(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"the optimizers have \[3\] in the checkpoint and \[2\] here"):
        Rows(0, 3, 8, part="other").load(saved)


def test_ranges_with_one_beginning(tmp_path: Path) -> None:
    """Read once, as far as the longest."""
    files = published(Rows(0, 8, 8).put(TABLE).save(tmp_path / "saved"))
    found: list[list[float]] = []
    batch = resharding.Batch(read_contents(files), ChunkReader(files, check(files).files))
    for after in (5, 3):

        def keep(flat: torch.Tensor, n: int = after - 2) -> None:
            found.append(flat[:n].tolist())

        batch.add("model.part.one.weight", 2, after, keep)
    batch.read()
    assert found == [TABLE.T.reshape(-1)[2:5].tolist(), TABLE.T.reshape(-1)[2:3].tolist()]


def test_what_is_not_exported(tmp_path: Path) -> None:
    """A model in parts into one file; a plain model as megatron-core's; twice."""
    saved = Rows(0, 8, 8).put(TABLE).save(tmp_path / "saved")
    with pytest.raises(CheckpointError, match="holds a model in 1 parts .part.* Export it with `--format megatron`"):
        export(saved, tmp_path / "one.ckpt")
    assert not (tmp_path / "one.ckpt").exists()
    assert export_megatron(saved, tmp_path / "out") == (tmp_path / "out" / "iter_0000007", ["part.seen"])
    with pytest.raises(CheckpointError, match="iter_0000007 exists. Move it away"):
        export_megatron(saved, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "iter_0000007", "latest_checkpointed_iteration.txt"
    ]  # fmt: skip
    run = Rows(0, 8, 8).run
    run.save(tmp_path / "plain")
    with pytest.raises(CheckpointError, match="does not say where its tensors lie"):
        export_megatron(tmp_path / "plain", tmp_path / "out")


FLOATS = TensorInfo("float32", (4,), (1,))
HALF = TensorInfo("float32", (2,), (1,))


def contents(**more: Any) -> Contents:
    """A checkpoint of a tensor in two parts, "a" and "b", with a param group and state."""
    halves = {"a.x": HALF, "b.x": HALF}
    boxes = {name: [Box("x", (4,), (2 * k,), (2,), 0, (1,))] for k, name in enumerate(halves)}
    state = {name: StateInfo({"exp": "float32"}, {}, {"step": 3}) for name in halves}
    optimizer = OptimizerInfo("Adam", [{"params": ["a.x"], "lr": 1}, {"params": ["b.x"], "lr": 2}], state)
    return replace(Contents(halves, {}, {}, [optimizer], boxes, [], ["a", "b"]), **more)


def sources(found: Contents, info: TensorInfo = FLOATS) -> Sources:
    return Sources(found, [""], {"x": info}, {"x": [Box("x", (4,), (0,), (4,), 0, (1,))]})


def test_param_groups() -> None:
    with pytest.raises(CheckpointError, match="1 param groups differ: group 0 of optimizer 0 differs in x"):
        sources(contents()).check_groups([[["x"], []]])
    with pytest.raises(CheckpointError, match=r"have \[2\] in the checkpoint and \[1\] here"):
        sources(contents()).check_groups([[["x"]]])
    (optimizer,) = contents().optimizers
    whole = replace(optimizer, groups=[{"params": ["a.x", "b.x"]}, {"params": []}])
    sources(contents(optimizers=[whole])).check_groups([[["x"], []]])
    sources(contents(optimizers=[replace(optimizer, groups=[])])).check_groups([[["x"]], []])


def test_state() -> None:
    found = sources(contents())
    assert found.state(0, "x") == StateInfo({"exp": "float32"}, {}, {"step": 3})
    (optimizer,) = contents().optimizers
    for state, said in (
        ({"a.x": StateInfo({"exp": "float32"})}, "The state of x cannot be put together"),
        ({**optimizer.state, "b.x": StateInfo({"exp": "float64"})}, "The state of x cannot be put together"),
        (dict.fromkeys(optimizer.state, StateInfo({}, {"row": HALF})), "'row' of optimizer 0 does not have"),
    ):
        with pytest.raises(CheckpointError, match=said):
            sources(contents(optimizers=[replace(optimizer, state=state)])).state(0, "x")
    assert sources(contents(optimizers=[replace(optimizer, state={})])).state(0, "x") is None
    assert sources(contents(optimizers=[])).state(0, "x") is None


def test_dtypes() -> None:
    """Values may get more bits, but not fewer."""
    halves = {"a.x": replace(HALF, dtype="bfloat16"), "b.x": replace(HALF, dtype="bfloat16")}
    sources(contents(weights=halves))
    with pytest.raises(CheckpointError, match="x is float32 in the checkpoint and bfloat16 here"):
        sources(contents(), replace(FLOATS, dtype="bfloat16"))


def test_contents_as_plain_data() -> None:
    for each in (contents(), contents(objects=["x._extra_state/shard_0_2"])):
        assert Contents.of_plain(each.as_plain()) == each
    earlier = {name: value for name, value in contents().as_plain().items() if name in ("weights", "aliases", "main")}
    assert Contents.of_plain({**earlier, "optimizers": []}).boxes == {}
