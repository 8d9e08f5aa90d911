"""How a batch is cut into micro-batches."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_replica.errors import ConfigurationError
from lightning_replica.megatron.schedule import size_of, split


@given(st.integers(1, 5), st.integers(1, 4))
def test_micro_batches_are_the_batch(count: int, size: int) -> None:
    tokens = torch.arange(count * size * 3).view(count * size, 3)
    batch = {"tokens": tokens, "more": [tokens[:, :1], (tokens[:, 0],)], "name": "x", "scale": torch.tensor(2.0)}
    cut = split(batch, size)
    assert len(cut) == count
    assert torch.equal(torch.cat([each["tokens"] for each in cut]), tokens)
    assert torch.equal(torch.cat([each["more"][1][0] for each in cut]), tokens[:, 0])
    assert all(each["name"] == "x" and each["scale"] == 2.0 for each in cut)
    assert {size_of(each) for each in cut} == {(size, 3)}


@pytest.mark.parametrize(
    ("samples", "stages", "sizes"),
    [(4, 1, [2, 2]), (3, 1, [1, 1, 1]), (1, 1, [1]), (2, 2, [1, 1]), (6, 2, [1] * 6), (8, 2, [2] * 4)],
)
def test_the_last_batch_of_validation_data(samples: int, stages: int, sizes: list[int]) -> None:
    cut = split(torch.ones(samples, 2), 2, is_training=False, stages=stages)
    assert [len(each) for each in cut] == sizes


@pytest.mark.parametrize("is_training", [True, False])
def test_interleaved_stages_need_a_multiple(is_training: bool) -> None:
    with pytest.raises(ConfigurationError, match="makes 3 micro-batches, but interleaved stages need a multiple"):
        split(torch.ones(3, 2), 1, is_training, stages=2)


def test_a_batch_is_one_micro_batch() -> None:
    (only,) = split([torch.ones(4, 2)], None)
    assert only[0].shape == (4, 2)


@pytest.mark.parametrize(
    ("batch", "size", "said"),
    [
        (torch.ones(6, 2), 4, "A batch of 6 samples is no multiple of micro_batch_size=4"),
        ([torch.ones(6, 2), torch.ones(4, 2)], 2, r"which is \[4, 6\]"),
        ({"text": "a"}, 2, r"which is \[\]"),
    ],
)
def test_batches_that_cannot_be_cut(batch: Any, size: int, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        split(batch, size)


def test_a_micro_batch_without_tokens() -> None:
    with pytest.raises(ConfigurationError, match="needs a tensor of shape"):
        size_of([torch.ones(3)])
