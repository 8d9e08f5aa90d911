import io
import queue
import sqlite3
import tempfile
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Callable
from contextlib import closing
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.loggers import Logger

from lightning_replica.core.inexact import Inexact
from lightning_replica.state.checkpoint_files import CheckpointFiles
from lightning_replica.state.logger_rows import LoggerRows
from lightning_replica.state.objects.capture import Anchors
from tests.support.doubles import overriding


class Lines(Logger):
    name, version = "lines", 0

    def __init__(self) -> None:
        self.lines: list[Any] = []

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError

    def log_metrics(self, metrics: Any, step: int | None = None, *, commit: bool = False) -> None:
        self.lines.append((step, *metrics))


def window(rows: LoggerRows, logger: Lines, step: int, until: str = "end") -> None:
    """One batch, with what is logged at its start, and after its update."""
    rows.taken("batch", step)
    logger.log_metrics({"lr": 0.1}, step)
    if until == "backward":
        return
    rows.taken("tail", step + 1)
    tail(logger, step)


def tail(logger: Lines, step: int) -> None:
    logger.log_metrics(metrics={"loss": 1.0}, step=step, commit=True)


EXPECTED = [(0, "lr"), (0, "loss"), (1, "lr"), (1, "loss"), (2, "lr"), (2, "loss")]


def test_a_batch_that_is_done_again_and_again() -> None:
    logger = Lines()
    rows = LoggerRows(dist.HashStore(), [logger], is_replacement=False)
    window(rows, logger, 0)
    for _ in range(3):
        window(rows, logger, 1, "backward")
        rows.restored("batch", 1)
    window(rows, logger, 1)
    window(rows, logger, 2)
    assert logger.lines == EXPECTED
    rows.release()
    assert "log_metrics" not in vars(logger)


@overriding()
class CutOff(dist.HashStore):
    """A store that gives no answer."""

    def check(self, *_: Any) -> bool:
        raise dist.DistStoreError("no answer")


def test_a_rank_that_is_cut_off_logs_nothing() -> None:
    """Its replacement would log the row again."""
    logger = Lines()
    rows = LoggerRows(CutOff(), [logger], is_replacement=False)
    with pytest.raises(dist.DistStoreError):
        window(rows, logger, 0)
    assert logger.lines == []
    rows.release()


def test_a_rank_that_is_cut_off_writes_no_checkpoint() -> None:
    """Its replacement would take the file for one of an earlier run."""
    files = CheckpointFiles(CutOff(), [], is_replacement=False, writes=True)
    with pytest.raises(dist.DistStoreError):
        files.is_written("epoch=0.ckpt")


def test_a_replacement_that_goes_back_to_the_tail() -> None:
    """It passes what its predecessor had written there and in the next batch; and once more after a second fault."""
    store, logger = dist.HashStore(), Lines()
    rows = LoggerRows(store, [logger], is_replacement=False)
    window(rows, logger, 0)
    window(rows, logger, 1, "backward")
    for again in ("tail", "batch"):
        rows.release()
        rows = LoggerRows(store, [logger], is_replacement=True)
        logger.log_metrics({"hp_metric": -1}, 0)  # of its set-up, as its predecessor's
        rows.restored(again, 1)
        if again == "tail":
            tail(logger, 0)
        window(rows, logger, 1, "backward")
    rows.restored("batch", 1)
    window(rows, logger, 1)
    window(rows, logger, 2)
    assert logger.lines == EXPECTED


def test_a_replacement_whose_predecessor_wrote_nothing_since() -> None:
    store, logger = dist.HashStore(), Lines()
    rows = LoggerRows(store, [logger], is_replacement=False)
    window(rows, logger, 0)
    rows.taken("batch", 1)
    rows.release()
    rows = LoggerRows(store, [logger], is_replacement=True)
    rows.restored("batch", 1)
    window(rows, logger, 1)
    window(rows, logger, 2)
    assert logger.lines == EXPECTED


def test_a_commit_that_fails_after_its_snapshot() -> None:
    """It was entered here, and not by all: all go back to the tail of the step before."""
    logger = Lines()
    rows = LoggerRows(dist.HashStore(), [logger], is_replacement=False)
    window(rows, logger, 0)
    for _ in range(3):
        window(rows, logger, 1, "backward")
        rows.taken("tail", 2)
        rows.restored("tail", 1)
        tail(logger, 0)
    window(rows, logger, 1)
    window(rows, logger, 2)
    assert logger.lines == EXPECTED


class StandIn:
    """Hands everything on to a logger."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)


def test_a_logger_that_stands_in_for_another_one() -> None:
    lines = Lines()
    logger: Any = StandIn(lines)
    rows = LoggerRows(dist.HashStore(), [logger], is_replacement=False)
    window(rows, logger, 0)
    window(rows, logger, 1, "backward")
    rows.restored("batch", 1)
    window(rows, logger, 1)
    assert lines.lines == EXPECTED[:4]


@pytest.mark.parametrize("is_replacement", [False, True])
def test_a_replacement_names_a_logger_that_keeps_rows_in_memory(is_replacement: bool) -> None:
    inexact, logger = Inexact(), Lines()
    log_three(LoggerRows(dist.HashStore(), [logger], is_replacement, report=inexact.report), logger)
    assert list(inexact.known) == (["logger 0 (Lines).lines"] if is_replacement else [])


def log_three(rows: LoggerRows, logger: Lines) -> None:
    rows.restored("batch", 0)
    for step in range(3):
        rows.taken("batch", step)
        logger.log_metrics({"loss": 1.0}, step)
    rows.release()


class Elsewhere(Lines):
    """Hands its rows to another object."""

    def __init__(self, keeper: Any, add: Callable[[Any, str], Any]) -> None:
        super().__init__()
        self.keeper, self.add = keeper, add

    def log_metrics(self, metrics: Any, step: int | None = None, *, commit: bool = False) -> None:
        self.add(self.keeper, f"{step} {metrics}")


class Trainer:
    """Has a name of its own."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.lock = threading.Lock()


NAMED, KEEPER = Trainer(), "logger 0 (Elsewhere).keeper"


def findings_of(keeper: Any, add: Callable[[Any, str], Any]) -> dict[str, str]:
    inexact, logger = Inexact(), Elsewhere(keeper, add)
    named = partial(Anchors.of, [("trainer", NAMED)])
    log_three(LoggerRows(dist.HashStore(), [logger], True, named, inexact.report), logger)
    return {name: each.scope for name, each in inexact.known.items()}


def test_rows_that_leave_the_process_or_that_something_else_keeps() -> None:
    rows = queue.SimpleQueue[str]()
    NAMED.seen.clear()
    with tempfile.TemporaryFile("w") as file:
        assert findings_of(file, lambda file, row: file.write(row)) == {}
    assert findings_of(rows, lambda rows, row: rows.put(row)) == {}
    assert findings_of(NAMED, lambda named, row: named.seen.append(row)) == {}
    assert findings_of(weakref.ref(NAMED), lambda named, row: named().seen.append(row)) == {}
    assert len(NAMED.seen) == 6


def test_rows_that_an_object_of_any_kind_keeps() -> None:
    assert findings_of(io.StringIO(), lambda stream, row: stream.write(row)) == {KEEPER: "once"}
    assert findings_of(deque[str](maxlen=1), lambda rows, row: rows.append(row)) == {KEEPER: "once"}
    assert findings_of(SimpleNamespace(last=""), lambda rows, row: setattr(rows, "last", row)) == {KEEPER: "once"}
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("CREATE TABLE rows (row)")
        assert findings_of(connection, lambda keeper, _: keeper.execute("INSERT INTO rows VALUES (1)")) == {
            KEEPER: "once"
        }
    assert findings_of(zlib.compressobj(), lambda *_: None) == {KEEPER: "unknown"}
