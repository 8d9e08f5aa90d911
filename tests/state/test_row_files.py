"""A row is in a logger's files once, wherever the rank that writes it is lost."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from lightning_replica._compat.lightning import continue_csv
from lightning_replica.core.inexact import Inexact
from lightning_replica.state.logger_rows import LoggerRows
from lightning_replica.state.written import Written
from tests.wild.outcome import scalars


class Lost(BaseException):
    """The process ends here."""


class Files:
    """The loggers that write to local files."""

    @staticmethod
    def csv(out: Path, **options: Any) -> Logger:
        logger = CSVLogger(out, version=0, **options)
        if Path(logger.log_dir).exists():
            continue_csv(logger)
        return logger

    @staticmethod
    def tensorboard(out: Path, **options: Any) -> Logger:
        return TensorBoardLogger(out, version=0, default_hp_metric=False, **options)


def written(out: Path) -> list[tuple[str, int, float]]:
    """Return (name, step, value) of all rows."""
    found = [row for path in out.rglob("*tfevents*") for row in scalars(path)]
    for path in out.rglob("metrics.csv"):
        with path.open() as file:
            rows = list(csv.DictReader(file))
            found += [(k, int(row["step"]), float(v)) for row in rows for k, v in row.items() if k != "step" and v]
    return sorted(found)


def tail(logger: Logger, step: int) -> None:
    logger.log_metrics({"loss": 1.0 + step}, step)
    logger.log_metrics({"lr": 0.5, **({"late": 2.0} if step == 2 else {})}, step)


def nothing(*_: Any) -> None:
    raise Lost


def half(logger: Logger) -> None:
    """Writes a part of a row and more that is no row."""
    type(logger).save(logger)
    (path,) = [each for each in Path(str(logger.log_dir)).iterdir() if each.name.startswith(("events", "metrics.csv"))]
    with path.open("ab") as file:
        file.write(b"\x18\0\0")
    raise Lost


def lose(monkeypatch: pytest.MonkeyPatch, logger: Logger, where: str) -> None:
    if where == "before the row":
        begin = Written.begin
        monkeypatch.setattr(Written, "begin", lambda *noted: nothing(begin(*noted)))
    elif where == "in the row":
        monkeypatch.setattr(logger, "save", lambda: half(logger), raising=False)
    elif where == "after the row":
        monkeypatch.setattr(Written, "add", nothing)


WHERE = ["before the row", "in the row", "after the row"]


@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("options", [{}, {"prefix": "mine"}])
@pytest.mark.parametrize("make", [Files.csv, Files.tensorboard])
def test_a_row_is_there_once(
    make: Callable[..., Logger],
    options: dict[str, Any],
    where: str,
    step: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, found = dist.HashStore(), Inexact()
    logger = make(tmp_path / "lost", **options)
    rows = LoggerRows(store, [logger], is_replacement=False)
    for number in range(step):
        rows.taken("tail", number + 1)
        tail(logger, number)
    rows.taken("tail", step + 1)
    with monkeypatch.context() as patch:
        lose(patch, logger, where)
        with pytest.raises(Lost):
            tail(logger, step)
    logger = make(tmp_path / "lost", **options)
    rows = LoggerRows(store, [logger], is_replacement=True, report=found.report)
    rows.restored("tail", step + 1)
    for number in range(step, 4):
        rows.taken("tail", number + 1)
        tail(logger, number)
    untouched = make(tmp_path / "untouched", **options)
    for number in range(4):
        tail(untouched, number)
    for each in (logger, untouched):
        each.save()
    assert written(tmp_path / "lost") == written(tmp_path / "untouched")
    assert len(written(tmp_path / "lost")) == 9
    assert found.after(replaced=True) == {}


@pytest.mark.parametrize("torn", ["los", "0.5,1", "1.0,0\r\n0.5,1"])
def test_a_line_that_a_crash_has_torn_is_cut_off(torn: str, tmp_path: Path) -> None:
    logger = Files.csv(tmp_path)
    logger.log_metrics({"loss": 1.0}, 0)
    logger.save()
    path = Path(str(logger.log_dir), "metrics.csv")
    lines = path.read_text()
    path.write_text(torn if torn == "los" else lines + torn, newline="")
    logger = Files.csv(tmp_path)
    logger.log_metrics({"loss": 2.0}, 1)
    logger.save()
    before = [("loss", 0, 1.0)] * (lines + torn).count("1.0") if torn != "los" else []
    assert written(tmp_path) == [*before, ("loss", 1, 2.0)]


def test_a_row_that_failed_is_not_cut_off_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user's code writes since would be cut off with it."""
    store, logger = dist.HashStore(), TensorBoardLogger(tmp_path, version=0, default_hp_metric=False)
    rows = LoggerRows(store, [logger], is_replacement=False)
    rows.taken("tail", 1)
    with monkeypatch.context() as patch:
        lose(patch, logger, "before the row")
        with pytest.raises(Lost):
            tail(logger, 0)
    rows.restored("tail", 1)
    logger.experiment.add_scalar("own", 3.0, 0)
    logger.experiment.flush()
    rows = LoggerRows(store, [TensorBoardLogger(tmp_path, version=0)], is_replacement=True)
    rows.restored("tail", 1)
    assert written(tmp_path) == [("own", 0, 3.0)]


BESIDE = "code writes to its files beside its rows: of a repeated step, that is there twice or missing"


def picture(logger: Any, step: int) -> None:
    if isinstance(logger, TensorBoardLogger):
        logger.experiment.add_text("picture", "of something", step)
    else:
        logger.experiment.log_metrics({"own": 1.0}, step)


def curves(logger: Any, step: int) -> None:
    """Writes files of their own."""
    if isinstance(logger, TensorBoardLogger):
        logger.experiment.add_scalars("curves", {"one": 1.0, "two": 2.0}, step)
    else:
        picture(logger, step)


@pytest.mark.parametrize("write", [picture, curves])
@pytest.mark.parametrize("make", [Files.csv, Files.tensorboard])
def test_what_code_writes_beside_rows_is_told(
    make: Callable[..., Logger], write: Callable[[Logger, int], None], tmp_path: Path
) -> None:
    found, logger = Inexact(), make(tmp_path)
    rows = LoggerRows(dist.HashStore(), [logger], is_replacement=False, report=found.report)
    logger.log_metrics({"of a fit before": 1.0}, 0)
    for step in range(4):  # in step 2 another column comes
        rows.taken("tail", step + 1)
        tail(logger, step)
        logger.save()
    assert found.after(replaced=False) == {}
    write(logger, 4)
    tail(logger, 4)
    assert found.after(replaced=False) == {f"logger 0 ({type(logger).__name__})": BESIDE}


def test_what_lightning_writes_before_the_first_step_is_not_meant(tmp_path: Path) -> None:
    found, logger = Inexact(), TensorBoardLogger(tmp_path, version=0)
    rows = LoggerRows(dist.HashStore(), [logger], is_replacement=False, report=found.report)
    logger.log_hyperparams({"width": 3})
    rows.taken("tail", 0)
    for step in range(2):
        rows.taken("tail", step + 1)
        tail(logger, step)
    assert found.after(replaced=False) == {}


def test_a_row_that_raises_half_way(tmp_path: Path) -> None:
    found, logger = Inexact(), Files.tensorboard(tmp_path)
    rows = LoggerRows(dist.HashStore(), [logger], is_replacement=False, report=found.report)
    rows.taken("tail", 1)
    tail(logger, 0)
    with pytest.raises(ValueError, match="you tried to log"):
        logger.log_metrics({"good": 1.0, "bad": "no number"}, 1)  # type: ignore[dict-item]
    tail(logger, 1)
    assert found.after(replaced=False) == {}


def test_loggers_that_share_files(tmp_path: Path) -> None:
    found, loggers = Inexact(), [Files.tensorboard(tmp_path), Files.tensorboard(tmp_path)]
    rows = LoggerRows(dist.HashStore(), loggers, is_replacement=False, report=found.report)
    for step in range(4):
        rows.taken("tail", step + 1)
        for logger in loggers:
            tail(logger, step)
    assert found.after(replaced=True) == {}


class Counting(CSVLogger):
    """Also counts rows somewhere else."""

    def log_metrics(self, *arguments: Any, **keywords: Any) -> None:
        super().log_metrics(*arguments, **keywords)


class Remote(Logger):
    """Sends rows to where nobody sees how many there are."""

    name, version = "remote", 0

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError

    def log_metrics(self, *_: Any, **__: Any) -> None:
        """Send a row."""


@pytest.mark.parametrize("where", ["before the row", "after the row", ""])
@pytest.mark.parametrize("make", [lambda out: Remote(), Counting])
def test_a_row_that_may_be_there_twice_is_told(
    make: Callable[[Path], Logger], where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, found, logger = dist.HashStore(), Inexact(), make(tmp_path)
    rows = LoggerRows(store, [logger], is_replacement=False)
    rows.taken("tail", 1)
    with monkeypatch.context() as patch:
        lose(patch, logger, where)
        try:
            logger.log_metrics({"loss": 1.0}, 0)
        except Lost:
            assert where
    rows = LoggerRows(store, [make(tmp_path)], is_replacement=True, report=found.report)
    rows.restored("tail", 1)
    why = "rank 0 was lost while it wrote the row of step 0, which may be there twice"
    assert found.after(replaced=True) == ({f"logger 0 ({type(logger).__name__})": why} if where else {})
    rows.restored("tail", 1)
    assert found.after(replaced=True) == {}
