"""Workers of a running iteration: how their deaths are told, and how they end."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_replica.devices.host import rng_state, set_rng_state
from lightning_replica.errors import WorkerDiedError
from lightning_replica.state.data import deaths
from lightning_replica.state.data.feed import END, Feed
from lightning_replica.state.data.position import ExactLoader
from lightning_replica.state.data.sources import Copied, copied_by_workers
from tests.state.data.test_worker_deaths import is_gone
from tests.support.ranks import run_ranks


class Processes(Dataset[Tensor]):
    """The process that loads, and a random number."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(os.getpid()), float(index), float(torch.rand(()))], dtype=torch.float64)


@pytest.fixture
def held() -> Iterator[None]:
    deaths.hold()
    yield
    deaths.release()


def pid_of(batch: Tensor) -> int:
    return int(batch[0, 0])


def feed_of(loader: Any) -> Feed:
    return Feed(loader, rng_state, set_rng_state, Copied(copied_by_workers(loader)))


@pytest.mark.usefixtures("held")
def test_a_death_is_told_when_the_next_batch_is_asked_for() -> None:
    feed = feed_of(DataLoader(Processes(), batch_size=1, num_workers=2))
    feed.begin()
    pid = pid_of(feed.next()[0])
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # the handler of SIGCHLD runs here, and says nothing
    with pytest.raises(WorkerDiedError, match=f"pid {pid}"):
        feed.next()
    assert not feed.is_live


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_that_were_stopped_end(persistent: bool) -> None:
    feed = feed_of(DataLoader(Processes(), batch_size=1, num_workers=2, persistent_workers=persistent))
    feed.begin()
    pids = [pid_of(feed.next()[0]) for _ in range(2)]
    os.kill(pids[1], signal.SIGSTOP)
    feed.close()
    assert all(is_gone(pid) for pid in pids)


def leaves_a_stopped_worker(rank: int, store: Any, where: str) -> None:
    loader = DataLoader(Processes(), batch_size=1, num_workers=2, multiprocessing_context="fork")
    feed = feed_of(loader)
    feed.begin()
    pid = pid_of(feed.next()[0])
    os.kill(pid, signal.SIGSTOP)
    Path(where).write_text(str(pid))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_stopped_worker_ends_with_its_rank(tmp_path: Path) -> None:
    assert run_ranks(1, leaves_a_stopped_worker, str(tmp_path / "pid")) == [{"died": -signal.SIGKILL}]
    pid = int((tmp_path / "pid").read_text())
    while not is_gone(pid):  # the kernel's doing; it need not be quick
        pass


def test_what_a_loader_is_told_before_an_iteration_counts_in_it() -> None:
    loader = DataLoader(Processes(), batch_size=1, num_workers=2)
    exact = ExactLoader(loader, rng_state, set_rng_state)

    def seed(worker: int) -> None:
        torch.manual_seed(worker)

    loader.worker_init_fn = seed
    drawn = [float(batch[0, 2]) for batch in exact]
    for worker in range(2):
        generator = torch.Generator().manual_seed(worker)
        assert drawn[worker::2] == [float(torch.rand((), generator=generator)) for _ in range(4)]
    exact.close()


class Pinned:
    """A batch that is "pinned" in the thread that torch has for it; once, that fails."""

    def __init__(self, samples: list[Tensor]) -> None:
        self.indices = [int(sample[1]) for sample in samples]

    def pin_memory(self) -> list[int]:
        marker = Path(os.environ["PIN_FAILS_ONCE"])
        if self.indices[0] == 4 and not marker.exists():
            marker.touch()
            raise RuntimeError("cannot pin")
        return self.indices


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_while_pinning(workers: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As if there were an accelerator: the thread is torch's own."""
    monkeypatch.setenv("PIN_FAILS_ONCE", str(tmp_path / "failed"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cpu"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
    loader = DataLoader(Processes(), batch_size=2, num_workers=workers, collate_fn=Pinned, pin_memory=True)
    exact = ExactLoader(loader, rng_state, set_rng_state)
    batches = iter(exact)
    assert [next(batches), next(batches)] == [[0, 1], [2, 3]]
    state = exact.state()
    with pytest.raises(RuntimeError, match="cannot pin"):
        next(batches)
    exact.rewind(state)
    assert list(exact) == [[4, 5], [6, 7]]
    exact.close()


def test_the_end() -> None:
    feed = feed_of([1])
    feed.begin()
    assert feed.next() == (1, None)
    assert feed.next() is END
