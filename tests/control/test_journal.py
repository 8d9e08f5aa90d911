"""The journal of what collectives gave, over a real store."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_replica.control import keys
from lightning_replica.control.blobs import Blobs
from lightning_replica.control.journal import Call, Journal
from lightning_replica.errors import RecoveryError


def call(number: int, *shapes: str, operation: str = "allreduce") -> Call:
    return Call(operation, shapes or ("float32[1]",), "all_reduce", f"train.py:{number}, main")


def write(journal: Journal, group: str, called: Call, *tensors: Tensor, first: bool = True) -> None:
    journal.write(journal.reserve(group), called, tensors or [torch.full((1,), float(called.where[9]))], first)


def read(journal: Journal, group: str, called: Call, **options: Any) -> list[Any]:
    return [tensor.tolist() for tensor in journal.read(group, called, **options)]


def test_a_replacement_reads_what_its_predecessor_was_given() -> None:
    store = dist.HashStore()
    writing = Journal(store, 1)
    write(writing, "world", call(1))
    write(writing, "pair", call(2, "int64[2]", "bool[]"), torch.tensor([3, 4]), torch.tensor(True))
    write(writing, "world", call(3))

    reading = Journal(store, 1, reading=1)
    assert reading.mode == "reading"
    assert read(reading, "world", call(1)) == [[1.0]]
    assert read(reading, "world", call(3)) == [[3.0]]  # groups do not wait for each other: threads may use them
    assert read(reading, "pair", call(2, "int64[2]", "bool[]")) == [[3, 4], True]
    assert not store.check(["journal/0/0/world/main/0"])  # of another rank


@pytest.mark.parametrize(
    ("called", "said"),
    [
        (call(2), "train.py:2, main"),  # elsewhere in the script
        (call(1, "float32[2]"), r"`all_reduce` on float32\[2\] in train.py:1"),
        (call(1, operation="broadcast"), "train.py:1, main"),
    ],
)
def test_what_does_not_match_says_what_the_predecessor_did(called: Call, said: str) -> None:
    store = dist.HashStore()
    write(Journal(store, 1), "world", call(1))
    did = r"its predecessor called `all_reduce` on float32\[1\] in train.py:1, main\. A script must do the same"
    with pytest.raises(RecoveryError, match=f"(?s)replacement of rank 1 called .*{said}.*{did}"):
        Journal(store, 1, reading=1).read("world", called)


def test_the_end_is_told_too() -> None:
    with pytest.raises(RecoveryError, match="its predecessor called no further collective"):
        Journal(dist.HashStore(), 1, reading=1).read("world", call(1))


def test_what_a_replacement_leaves_out_does_not_shift_the_rest() -> None:
    """A sanity validation sets its data up, with collectives of the user's; a replacement does that at another time."""
    store = dist.HashStore()
    writing = Journal(store, 0)
    sanity = [False]
    writing.may_leave_out(lambda: sanity[0])
    write(writing, "world", call(1))
    sanity[0] = True
    for number in (2, 3, 4):
        write(writing, "world", call(number))
    sanity[0] = False
    write(writing, "world", call(5))

    reading = Journal(store, 0, reading=1)
    assert read(reading, "world", call(1)) == [[1.0]]
    assert read(reading, "world", call(5)) == [[5.0]]
    assert read(reading, "world", call(3)) == [[3.0]]
    with pytest.raises(RecoveryError):
        reading.read("world", call(2))  # it lies before the one that was found


def test_what_the_same_line_gave_at_another_time() -> None:
    """One function makes training and validation data. A replacement calls it for the latter first."""
    store = dist.HashStore()
    writing = Journal(store, 0)
    sanity = [True]
    writing.may_leave_out(lambda: sanity[0])
    write(writing, "world", call(1), torch.tensor([20.0]))  # validation data
    sanity[0] = False
    write(writing, "world", call(1), torch.tensor([10.0]))  # training data

    reading = Journal(store, 0, reading=1)
    with reading.reading_left_out():
        assert read(reading, "world", call(1)) == [[20.0]]
    assert read(reading, "world", call(1)) == [[10.0]]


def test_a_sender_may_have_another_size() -> None:
    store = dist.HashStore()
    write(Journal(store, 0), "world", call(1, "uint8[3]"), torch.zeros(3, dtype=torch.uint8))
    assert read(Journal(store, 0, reading=1), "world", call(1, "uint8[5]"), any_shape=True) == [[0, 0, 0]]


def test_segments() -> None:
    """The third training loop lies behind three of them."""
    store = dist.HashStore()
    writing = Journal(store, 0)
    for loop in (1, 2, 3):
        assert (writing.mode, writing.place) == ("writing", f"before {loop}")
        write(writing, "world", call(loop))
        writing.close()
        assert (writing.mode, writing.place) == ("closed", f"in {loop}")
        writing.begin_segment()
    reading = Journal(store, 0, reading=3)
    for loop in (1, 2, 3):
        assert reading.on_the_way == (loop < 3)
        assert read(reading, "world", call(loop)) == [[float(loop)]]
        reading.close()
        reading.begin_segment()
    assert reading.mode == "writing"  # it may be replaced in turn


def test_what_is_large_lies_in_a_file_that_ranks_share(tmp_path: Path) -> None:
    store, large = dist.HashStore(), torch.randn(100_000)
    shape = "float32[100000]"
    for rank in (0, 1):
        write(
            Journal(store, rank, blobs=Blobs(tmp_path)),
            "world",
            call(1, shape, operation="broadcast"),
            large,
            first=not rank,
        )
    assert len(list(tmp_path.iterdir())) == 1
    for rank in (0, 1):
        reading = Journal(store, rank, reading=1, blobs=Blobs(tmp_path))
        assert torch.equal(reading.read("world", call(1, shape, operation="broadcast"))[0], large)
    own = torch.randn(100_000)  # what nobody else has been given
    write(Journal(store, 1, blobs=Blobs(tmp_path)), "world", call(2, shape, operation="scatter"), own, first=False)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    store = dist.HashStore()
    write(Journal(store, 0, blobs=Blobs(tmp_path)), "world", call(1, "float32[100000]"), torch.randn(100_000))
    next(tmp_path.iterdir()).unlink()
    with pytest.raises(
        RecoveryError, match=r"cannot read the result of `all_reduce` on float32\[100000\] .*: .*No such file"
    ):
        Journal(store, 0, reading=1, blobs=Blobs(tmp_path)).read("world", call(1, "float32[100000]"))


def test_a_place_without_room(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The run goes on. A rank that is lost is not replaced, and the reason is known."""
    store = dist.HashStore()
    journal = Journal(store, 0, blobs=Blobs(tmp_path / "missing"))
    write(journal, "world", call(1, "float32[100000]"), torch.randn(100_000))
    said = store.get(keys.NO_REPLACEMENT).decode()
    assert said.startswith("the result of `all_reduce` on float32[100000] in ")
    assert "could not be written for it: [Errno 2] No such file" in said
    assert "TMPDIR" in said
    assert said in caplog.text
    write(journal, "world", call(1, "float32[1]"), torch.ones(1))
    with pytest.raises(RecoveryError, match="No such file"):
        Journal(store, 0, reading=1, blobs=Blobs(tmp_path)).read("world", call(1, "float32[100000]"))


def test_nothing_is_kept_where_nobody_is_replaced() -> None:
    store = dist.HashStore()
    journal = Journal(store, 0, kept=False)
    assert journal.mode == "closed"
    journal.begin_segment()
    assert journal.mode == "closed"


def test_what_is_left_over_is_told(caplog: pytest.LogCaptureFixture) -> None:
    store = dist.HashStore()
    writing = Journal(store, 0)
    for number in (1, 2):
        write(writing, "world", call(number))
    reading = Journal(store, 0, reading=1)
    reading.read("world", call(1))
    reading.close()
    assert "left out a call that its predecessor made" in caplog.text
    assert "train.py:2" in caplog.text
