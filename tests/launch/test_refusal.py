"""What is refused at the start, in the first process, with what to do."""

import os
import subprocess
import unittest
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_replica import ConfigurationError
from lightning_replica.launch.environment import RankEnvironment
from lightning_replica.launch.refusal import refuse_children, refuse_grandchildren
from lightning_replica.stores.address import StoreAddress
from tests.support.ranks import run_ranks


def fit() -> None:
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(strategy="replica_zero", accelerator="cpu", devices=2, fast_dev_run=True, **options)
    trainer.fit(BoringModel())


def test_a_fit_in_a_test() -> None:
    """Every rank would run all tests; and a good fit would fail with SystemExit: 0."""
    with pytest.raises(ConfigurationError, match=r"the whole session of pytest\. Put the training into a script"):
        fit()


def test_a_trainer_in_a_test_is_no_fit() -> None:
    assert L.Trainer(strategy="replica_zero", accelerator="cpu", devices=2, logger=False).world_size == 2


class Case(unittest.TestCase):
    __test__ = False

    def runTest(self) -> None:
        fit()


def test_unittest_is_told_apart() -> None:
    result = unittest.TestResult()
    Case().run(result)
    ((_, traceback),) = result.errors
    assert "the whole session of unittest." in traceback


@pytest.mark.parametrize(
    ("store", "supervisor"), [("nowhere", "1"), ("localhost:x", "1"), ("localhost:1", "me"), ("localhost:1", None)]
)
def test_variables_that_no_supervisor_has_set(
    store: str, supervisor: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_REPLICA_STORE", store)
    monkeypatch.setenv("LIGHTNING_REPLICA_GENERATION", "0")
    if supervisor is not None:
        monkeypatch.setenv("LIGHTNING_REPLICA_SUPERVISOR", supervisor)
    with pytest.raises(ConfigurationError, match=f"LIGHTNING_REPLICA_STORE='{store}'.*Unset all variables"):
        RankEnvironment.current()


def test_a_trainer_in_a_thread() -> None:
    with ThreadPoolExecutor(1, thread_name_prefix="agent") as threads:
        made = threads.submit(L.Trainer, strategy="replica_zero", accelerator="cpu", devices=2, logger=False)
        with pytest.raises(ConfigurationError, match="in the main thread only, .* in the thread 'agent_0'"):
            made.result()


def refused(rank: int, store: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        refuse_children()
    return str(caught.value)


def test_a_trainer_in_a_process_that_the_script_starts() -> None:
    refuse_children()
    (said,) = run_ranks(1, refused)
    assert "a process that the script has started" in said


def test_a_script_that_a_rank_starts() -> None:
    store = StoreAddress("127.0.0.1", 1)
    with pytest.raises(ConfigurationError, match=r"A rank may have started it.*LIGHTNING_REPLICA_, and LOCAL_RANK"):
        refuse_grandchildren(RankEnvironment(store, os.getpid(), 0))
    refuse_grandchildren(RankEnvironment(store, os.getppid(), 0))
    ended = subprocess.Popen(["true"])
    ended.wait()
    refuse_grandchildren(RankEnvironment(store, ended.pid, 0))  # an orphan, which ends by itself
