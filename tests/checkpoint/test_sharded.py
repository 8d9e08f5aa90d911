"""Real ranks: what is saved by one world is loaded by another, bit for bit, and training goes on from it."""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from lightning_replica._compat.torch import read_dcp_metadata
from lightning_replica.checkpoint.sharded import read_plain, untrained_tensors_of
from lightning_replica.core.grid import Grid
from tests.checkpoint.job import CASES, Net, Run, World, assemble, load_all, save_all
from tests.support.ranks import run_ranks

WRITERS = {  # (N, R): what they train
    (4, 2): list(CASES),
    (3, 1): ["AdamW", "bf16", "two"],
    (1, 1): ["bf16", "Adafactor"],
}
READERS = [(2, 2), (4, 2), (3, 3), (1, 1)]


def per_name(results: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    for result in results:
        assert not {"raised", "died"} & set(result), result.get("raised", result)
    return {
        name: {moment: assemble([result[name][moment] for result in results]) for moment in ("saved", "after")}
        for name in results[0]
    }


def test_every_world_reads_what_every_world_wrote(tmp_path: Path) -> None:
    written: dict[str, Any] = {}
    for (size, replicas), cases in WRITERS.items():
        wanted = [[case, replicas, partition] for case in cases for partition in CASES[case].partitions]
        written |= per_name(run_ranks(size, save_all, size, wanted, str(tmp_path)))
    assert len(written) == 13 + 6 + 3
    compared = 0
    for size, replicas in READERS:
        wanted = [[name, replicas, p] for name in written for p in CASES[name.split("-")[0]].partitions]
        read = per_name(run_ranks(size, load_all, size, wanted, str(tmp_path)))
        for key, found in read.items():
            name, _, partition = key.split(" ")
            expected = written[name]
            assert found["saved"].keys() == expected["saved"].keys(), key
            differing = [k for k in expected["saved"] if found["saved"][k] != expected["saved"][k]]
            assert not differing, (key, differing)
            if name.endswith(f"-{size}-{replicas}-{partition}"):
                differing = [k for k in expected["after"] if found["after"][k] != expected["after"][k]]
                assert not differing, (key, differing)
                assert found["after"] != found["saved"]
                compared += 1
    assert compared == 13 + 3


def written_once(rank: int, store: Any, root: str) -> dict[str, Any]:
    world = World(rank, store, 4)
    run = world.run("bf16", 2, "element")
    run.train(1)
    run.save(Path(root) / "step")
    trained = [p.numel() for buffers in run.state.buffers for p in buffers.parameters]
    updated = [p.numel() for b in run.state.buffers for p, u in zip(b.parameters, b.used, strict=True) if u]
    others = [tensor.numel() for tensor in untrained_tensors_of(run.net, run.state)[0].values()]
    return {"trained": sum(trained), "updated": sum(updated), "others": sum(others)}


def test_every_element_is_written_once_and_by_all(tmp_path: Path) -> None:
    results = run_ranks(4, written_once, str(tmp_path))
    numel = results[0]
    metadata = read_dcp_metadata((tmp_path / "step" / ".metadata").read_bytes())
    written: dict[str, int] = {}
    by_rank: dict[str, int] = {}
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        for chunk in tensor.chunks:
            written[name.split(".")[0]] = written.get(name.split(".")[0], 0) + chunk.sizes.numel()
            file = metadata.storage_data[MetadataIndex(name, chunk.offsets)].relative_path
            by_rank[file] = by_rank.get(file, 0) + chunk.sizes.numel()
    assert written == {
        "model": numel["trained"] + numel["others"],
        "main": numel["trained"],
        "optimizer": 2 * numel["updated"],  # exp_avg and exp_avg_sq
    }
    assert sorted(by_rank) == [f"__{rank}_0.distcp" for rank in range(4)]
    # In a network this small, a third is padding: parameters begin at multiples of 16 elements (layout.py).
    assert max(by_rank.values()) < 1.6 * sum(by_rank.values()) / 4
    assert sorted(file.name for file in (tmp_path / "step").iterdir()) == sorted(
        [*by_rank, ".metadata", "contents.pt", "manifest.json", "plain.pt"]
    )
    plain = read_plain(tmp_path / "step")
    assert plain.pop("callbacks") == {"best": torch.tensor(0.5), "names": ["a", "b"]}
    assert plain == {"epoch": 3}


def other_strides(rank: int, store: Any, root: str) -> dict[str, Any]:
    """Saves a network in another memory format, and loads it into a plain one."""
    world, same = World(rank, store, 2), []
    for dtype_case in ("AdamW", "bf16", "Adafactor"):
        for partition in CASES[dtype_case].partitions:
            odd = world.run(dtype_case, 1, partition, net=Net(torch.channels_last))
            odd.train(2)
            expected = odd.facts()
            if partition == "parameter":  # an optimizer need not make its state in the parameter's format
                for state in odd.state.optimizers[0].optimizer.state.values():
                    state.update({k: v.contiguous() for k, v in state.items() if isinstance(v, torch.Tensor)})
            odd.save(Path(root) / "step")
            for target in CASES[dtype_case].partitions:
                loaded = world.run(dtype_case, 2, target, fresh=True)
                loaded.load(Path(root) / "step")
                assert loaded.net.conv.weight.stride() != odd.net.conv.weight.stride()
                same.append(torch.equal(loaded.net.conv.weight, odd.net.conv.weight))
                back = world.run(dtype_case, 1, partition, fresh=True, net=Net(torch.channels_last))
                loaded.save(Path(root) / "again")
                back.load(Path(root) / "again")
                same.append(back.facts() == expected)
                loaded.close()
                back.close()
            odd.close()
    return {"same": same}


def test_another_memory_format(tmp_path: Path) -> None:
    for result in run_ranks(2, other_strides, str(tmp_path)):
        assert result == {"same": [True] * 18}


def survivors(rank: int, store: Any, root: str) -> dict[str, Any]:
    """Ranks 0 and 3 of four save everything: the peers of 0 and 3 are 2 and 1."""
    world = World(rank, store, 4)
    run = world.run("bf16", 2, "element")
    run.train(2)
    group = torch.distributed.new_group([0, 3])
    if rank in (0, 3):
        run.save(Path(root) / "gasp", group=group, ranks=run.state.grid.peers(rank))
    torch.distributed.barrier()
    again = world.run("bf16", 2, "element", fresh=True)
    again.load(Path(root) / "gasp")
    return {"same": again.facts() == run.facts()}


def test_survivors_write_what_their_peers_had(tmp_path: Path) -> None:
    assert run_ranks(4, survivors, str(tmp_path)) == [{"same": True}] * 4
    assert len(list((tmp_path / "gasp").glob("*.distcp"))) == 2


def without_groups(rank: int, store: Any, root: str) -> dict[str, Any]:
    run = Run("AdamW", 0, Grid.of(1, 1), "element")
    run.save(Path(root) / "step")
    again = Run("AdamW", 0, Grid.of(1, 1), "element", fresh=True)
    again.load(Path(root) / "step")
    return {"same": again.facts() == run.facts()}


def test_one_process_without_process_groups(tmp_path: Path) -> None:
    assert run_ranks(1, without_groups, str(tmp_path)) == [{"same": True}]


def unfreeze(rank: int, store: Any, root: str) -> dict[str, Any]:
    """What was frozen when it was saved is trained now, and the other way round."""
    world, path = World(rank, store, 2), Path(root) / "step"
    frozen = world.run("bf16", 1, "element")
    frozen.train(2)
    frozen.save(path)
    net = Net()
    net.frozen.requires_grad_(True)
    thawed = world.run("bf16", 2, "element", fresh=True, net=net)  # each rank has all
    for piece in thawed.state.optimizers[0].pieces:  # rounds to what will be loaded, but must not survive it
        piece.parameter.data.mul_(1 + 2**-12)
    thawed.load(path)
    mains = [p for p in thawed.state.optimizers[0].pieces if p.whole is net.frozen]
    same = [torch.equal(net.frozen, frozen.net.frozen), len(mains) > 0]
    same += [torch.equal(p.parameter.bfloat16(), p.buffers.split(p.where, net.frozen.detach())) for p in mains]
    same += [torch.equal(p.parameter, p.parameter.bfloat16().float()) for p in mains]
    thawed.train(1)
    thawed.save(path)
    back = world.run("bf16", 1, "element", fresh=True)
    back.load(path)
    same.append(torch.equal(back.net.frozen, net.frozen))
    return {"same": all(same)}


def test_frozen_then_trained_then_frozen(tmp_path: Path) -> None:
    assert run_ranks(2, unfreeze, str(tmp_path)) == [{"same": True}] * 2
