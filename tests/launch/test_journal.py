import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_replica.errors import RecoveryError
from lightning_replica.launch.journal import Journal


def never() -> Any:
    raise AssertionError("a replacement must not call set-up collectives")


def gives(value: Any) -> Callable[[], Any]:
    return lambda: value


def test_a_replacement_reads_what_its_predecessor_met_even_if_it_skips_some() -> None:
    store = dist.HashStore()
    writing = Journal(store, 1, reading=False)
    values = ["version_3", None, True, pathlib.PurePosixPath("logs"), {"a": [1, 2.5]}]
    for value in values:
        assert writing.entry(gives(value)) == value
    writing.mark("val_dataloader()")
    writing.entry(gives(torch.tensor(12)))
    writing.entry(gives("only in the sanity check"))
    writing.mark("on_train_start")
    writing.entry(gives("last"))

    reading = Journal(store, 1, reading=True)
    assert [reading.entry(never) for _ in values] == values
    reading.mark("val_dataloader()")
    assert int(reading.entry(never)) == 12
    reading.mark("on_train_start")
    assert reading.entry(never) == "last"


def test_ranks_do_not_read_each_other() -> None:
    store = dist.HashStore()
    Journal(store, 0, reading=False).entry(gives("mine"))
    with pytest.raises(
        RecoveryError, match="replacement of rank 1 met a set-up collective that its predecessor did not"
    ):
        Journal(store, 1, reading=True).entry(never)


def test_closed_it_does_not_write() -> None:
    store = dist.HashStore()
    journal = Journal(store, 0, reading=False)
    journal.close()
    assert journal.entry(gives(5)) == 5
    assert store.num_keys() == 0
