"""Whom the holders of a shard believe."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_replica.core.digests import Digest, all_changed_alike, ordered_digests, suspects


def said(*values: str) -> dict[int, Digest]:
    """Digests of ranks 0, 1 ...: "a" and "b" are values; "a!" has changed at rest."""
    return {rank: Digest(9, ord(value[0]), value.endswith("!")) for rank, value in enumerate(values)}


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        (("a",), ()),
        (("a!",), (0,)),
        (("a", "a"), ()),
        (("a", "b!"), (1,)),  # who has changed at rest knows so
        (("a!", "a!"), ()),  # both alike: the user's hooks
        (("a", "a!"), ()),  # it is well again
        (("a!", "b!"), (0, 1)),
        (("a", "b"), (0, 1)),  # the update of one of the two was wrong, nobody knows whose
        (("a", "b", "a"), (1,)),  # the majority
        (("a", "b", "c"), (0, 1, 2)),
        (("a", "b!", "c!"), (1, 2)),
        (("a", "b!", "b!"), (0,)),  # two that changed alike have not changed by chance
        (("a", "a", "b", "b"), (0, 1, 2, 3)),
        (("a", "a", "b!", "c!"), (2, 3)),
        (("a", "a", "b!", "b!"), (2, 3)),
        (("a", "b", "b", "b"), (0,)),
    ],
)
def test_verdicts(values: tuple[str, ...], wrong: tuple[int, ...]) -> None:
    assert suspects(said(*values)) == wrong


def test_shards_of_other_sizes_are_not_compared() -> None:
    assert suspects({0: Digest(8, 1, False), 1: Digest(9, 2, True)}) == ()
    assert suspects({}) == ()


def test_all_alike() -> None:
    assert all_changed_alike(said("a!", "a!"))
    assert not all_changed_alike(said("a!", "a"))
    assert not all_changed_alike(said("a!", "b!"))
    assert not all_changed_alike(said("a!"))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), min_size=1, max_size=5), st.randoms())
def test_whoever_is_believed_agrees(pairs: list[tuple[str, bool]], random: object) -> None:
    digests = said(*(value + "!" * changed for value, changed in pairs))
    believed = set(digests) - set(suspects(digests))
    assert len({digests[rank].value for rank in believed}) <= 1
    if len(pairs) > 1 and len({value for value, _ in pairs}) == 1:
        assert believed == set(digests)


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.complex64, torch.bool]


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 40), max_size=3), st.randoms())
def test_equal_tensors_have_equal_digests(dtype: torch.dtype, shape: list[int], random: Any) -> None:
    tensor = torch.tensor([random.randrange(100) for _ in range(torch.Size(shape).numel())]).view(shape).to(dtype)
    others = [tensor.clone(), torch.stack([tensor, tensor], -1)[..., 0]]
    assert len({*ordered_digests([tensor, *others])}) == 1
    if tensor.numel():
        other = tensor.clone()
        data = other.view(-1).view(torch.uint8)
        data[random.randrange(len(data))] ^= 1
        assert ordered_digests([other]) != ordered_digests([tensor])


@pytest.mark.parametrize("shape", [(7, 3), (500, 64), (4096, 2), (3, 100_000)])
def test_the_order_counts(shape: tuple[int, int]) -> None:
    tensor = torch.randn(shape)
    for dim in range(2):
        permuted = tensor.roll(1, dim)
        assert ordered_digests([permuted]) != ordered_digests([tensor])
