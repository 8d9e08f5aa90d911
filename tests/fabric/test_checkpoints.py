"""Files go both ways between DDP with the plain optimizer and `replica_zero`, and training resumes to the last bit."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_replica import FabricStrategy
from lightning_replica.checkpoint import publish
from lightning_replica.errors import CheckpointError
from tests.fabric.loop import Case, Net, Training, file_of, launch
from tests.support.ranks import open_world, run_ranks

WORLD = 4


def begin(rank: int, replicas: int | None, case: Case, world: int = WORLD) -> Training:
    strategy: Any = "ddp" if replicas is None else FabricStrategy(replicas=replicas, **case.strategy)
    return Training(launch(rank, world, strategy, case), case)


def state_of(training: Training) -> dict[str, Any]:
    state = {"optimizer": training.optimizer, "model": training.model, "step": 0}
    return state if training.schedule is None else {**state, "schedule": training.schedule}


def goes_on(rank: int, store: Any, folder: str, writer: int | None, reader: int | None, case: Case) -> Any:
    open_world(rank, store, WORLD)
    whole = begin(rank, writer, case)
    whole.run(range(3))
    whole.fabric.save(file_of(folder), {**state_of(whole), "step": 3})
    whole.run(range(3, 6))
    other = begin(rank, reader, case)
    other.run(range(2))  # what was there before does not matter
    state = state_of(other)
    rest = other.fabric.load(file_of(folder), state)
    other.run(range(state["step"], 6))
    return [whole.outcome() == other.outcome(), rest]


@pytest.mark.parametrize(("writer", "reader"), [(None, 2), (2, None), (2, 2), (1, 4)])
def test_resumes_to_the_last_bit(writer: int | None, reader: int | None, tmp_path: Path) -> None:
    case = Case(schedule="after", clip={"max_norm": 0.01}, groups=True)
    assert run_ranks(WORLD, goes_on, str(tmp_path), writer, reader, case) == [[True, {}]] * WORLD
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.pt"]


@pytest.mark.parametrize("partition", ["element", "parameter"])
def test_weights_of_16_bits_resume_with_their_32(partition: str, tmp_path: Path) -> None:
    case = Case(precision="bf16-true", options={"lr": 1e-4}, strategy={"partition": partition})
    assert run_ranks(WORLD, goes_on, str(tmp_path), 2, 2, case) == [[True, {}]] * WORLD


def writes(rank: int, store: Any, folder: str) -> Any:
    open_world(rank, store, WORLD)
    training = begin(rank, 2, Case())
    training.run(range(2))
    fabric, state = training.fabric, state_of(training)
    fabric.save(file_of(folder), state)
    fabric.save(Path(folder) / "new" / "raw.pt", training.optimizer.state_dict())
    fabric.save(Path(folder) / "part.pt", state, filter={"model": lambda name, _: name == "last.bias"})
    other = begin(rank, 1, Case())
    other.fabric.load_raw(Path(folder) / "new" / "raw.pt", other.optimizer)
    return training.outcome()["state"] == other.outcome()["state"]


def test_plain_torch_reads_it(tmp_path: Path) -> None:
    assert run_ranks(WORLD, writes, str(tmp_path)) == [True] * WORLD
    saved = torch.load(file_of(str(tmp_path)), weights_only=True)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1.0)
    net.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert optimizer.param_groups[0]["lr"] == 1e-2
    assert optimizer.state[net.last.bias]["step"] == 2
    assert saved["model"]["layers.0.weight"].untyped_storage().nbytes() == 4 * 33 * 5
    assert list(torch.load(tmp_path / "part.pt")["model"]) == ["last.bias"]
    assert (tmp_path / "part.pt").stat().st_size < file_of(str(tmp_path)).stat().st_size


def fails(rank: int, store: Any, folder: str) -> Any:
    open_world(rank, store, WORLD)
    training = begin(rank, 2, Case())
    fabric, path = training.fabric, file_of(folder)
    fabric.save(path, state_of(training))

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    publish.os.fsync = full  # type: ignore[attr-defined]
    said = []
    for work in (
        lambda: fabric.save(path, state_of(training)),
        lambda: fabric.save(path, {"model": training.model, "fails": lambda: None}),
        lambda: fabric.load(folder, state_of(training)),
        lambda: fabric.load(Path(folder) / "damaged.pt", state_of(training)),
    ):
        fabric.barrier()
        if fabric.is_global_zero:
            damaged = bytearray(path.read_bytes())
            damaged[damaged.find(training.model.last.weight.detach().numpy().tobytes())] ^= 1  # torch sees nothing
            (Path(folder) / "damaged.pt").write_bytes(damaged)
        fabric.barrier()
        try:
            work()
        except CheckpointError as error:
            said.append(str(error))
    return said


def test_every_rank_hears_of_a_failure(tmp_path: Path) -> None:
    for full, pickled, directory, damaged in run_ranks(WORLD, fails, str(tmp_path)):
        assert full.startswith("rank 0: ")
        assert full.endswith("checkpoint.pt.tmp could not be written: No space left on device.")
        assert "rank 0: " in pickled
        assert "pickle" in pickled or "local object" in pickled  # before Python 3.13, and since
        assert "is a directory, and Fabric reads one file. `lightning-replica export" in directory
        assert "damaged.pt cannot be used" in damaged
    assert torch.load(file_of(str(tmp_path)))["step"] == 0, "the former file is whole"
