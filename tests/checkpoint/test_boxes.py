"""Blocks and boxes, against tensors whose elements say where they are."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_replica.checkpoint.boxes import Block, Box, Stored
from lightning_replica.checkpoint.resharding import strided


def elements(block: Block, shape: tuple[int, ...]) -> set[int]:
    numbers = torch.arange(prod(shape)).view(shape)
    return set(part(numbers, block).reshape(-1).tolist())


def part(whole: Tensor, block: Block) -> Tensor:
    return whole[tuple(slice(first, first + length) for first, length in zip(block.offset, block.size, strict=True))]


shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


@st.composite
def blocks(draw: st.DrawFn, shape: tuple[int, ...]) -> Block:
    offset = tuple(draw(st.integers(0, length - 1)) for length in shape)
    return Block(offset, tuple(draw(st.integers(1, n - first)) for n, first in zip(shape, offset, strict=True)))


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[Box, int]:
    """A box in a rank's tensor, with the tensor's number of elements: the dimensions lie in it in any order."""
    block = draw(blocks(shape))
    start = draw(st.integers(0, 5))
    strides, numel = [0] * len(shape), 1
    for axis in draw(st.permutations(range(len(shape)))):
        strides[axis] = numel if block.size[axis] > 1 else draw(st.sampled_from([0, numel]))
        numel *= block.size[axis]
    return Box("key", shape, block.offset, block.size, start, tuple(strides)), start + numel + draw(st.integers(0, 5))


@given(st.data(), shapes)
def test_blocks_are_sets(data: st.DataObject, shape: tuple[int, ...]) -> None:
    one, other = data.draw(blocks(shape)), data.draw(blocks(shape))
    common = one.meet(other)
    both = elements(one, shape) & elements(other, shape)
    assert (elements(common, shape) if common else set()) == both
    if common:
        rest = [elements(each, shape) for each in one.without(common)]
        assert set().union(*rest) == elements(one, shape) - both
        assert sum(map(len, rest)) == one.numel - common.numel


@given(st.data(), shapes)
def test_every_element_is_found_once(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """Of whatever is stored, some of it several times, each rank puts its own together."""
    whole = torch.arange(1, prod(shape) + 1)
    stored = {str(number): data.draw(boxes(shape)) for number in range(data.draw(st.integers(0, 5)))}
    memory = {}
    for name, (box, numel) in stored.items():
        memory[name] = torch.zeros(numel, dtype=torch.long)
        strided(memory[name], box, box.block, 0).copy_(part(whole.view(shape), box.block))
    here, numel = data.draw(boxes(shape))
    found, missing = Stored({name: [box] for name, (box, _) in stored.items()}).find(here)
    mine = torch.zeros(numel, dtype=torch.long)
    for each in found:
        first, after = each.stored.span(each.block)
        read = memory[each.name][first:after].clone()  # nothing else is read
        strided(mine, here, each.block, 0).copy_(strided(read, each.stored, each.block, first))
    there = {number for box, _ in stored.values() for number in elements(box.block, shape)}
    assert sum(each.block.numel for each in found) == len(elements(here.block, shape) & there)
    assert {number for each in missing for number in elements(each, shape)} == elements(here.block, shape) - there
    expected = torch.zeros_like(mine)
    known = torch.tensor([number in there for number in range(prod(shape))]).view(shape)
    strided(expected, here, here.block, 0).copy_(part(whole.view(shape) * known, here.block))
    assert torch.equal(mine, expected)


@given(st.data(), shapes, st.integers(0, 40), st.integers(0, 40))
def test_a_range_of_a_tensor(data: st.DataObject, shape: tuple[int, ...], begin: int, length: int) -> None:
    """The block has all elements of the range; cut along its outermost dimension, none before or after would do."""
    box, numel = data.draw(boxes(shape))
    positions = strided(torch.arange(numel), box, box.block, 0)
    wanted = {each for each in positions.reshape(-1).tolist() if begin <= each < begin + length}
    inside = box.within(begin, begin + length)
    got = set() if inside is None else set(strided(torch.arange(numel), box, inside, 0).reshape(-1).tolist())
    assert wanted <= got
    if inside is not None:
        assert inside == box.block.meet(inside)
        (axis, *_), sizes = [k for k, (a, b) in enumerate(zip(inside.size, box.size, strict=True)) if a != b] or [0], {}
        for index in range(inside.size[axis]):
            sizes[index] = positions.select(axis, inside.offset[axis] - box.offset[axis] + index)
        assert all(each.max() >= begin and each.min() < begin + length for each in sizes.values())


def test_tensors_of_different_keys_have_nothing_in_common() -> None:
    one = Box("one", (4,), (0,), (4,), 0, (1,))
    stored = Stored({"a": [one]})
    assert stored.keys == ["one"]
    assert stored.shape("one") == (4,)
    assert stored.shape("other") is None
    assert stored.find(Box("other", (4,), (1,), (2,), 0, (1,))) == ([], [Block((1,), (2,))])


@pytest.mark.parametrize(
    ("offset", "size", "strides"),
    [((3, 0), (2, 2), (2, 1)), ((0, 0), (4, 2), (2,)), ((0, -1), (4, 2), (2, 1)), ((0, 0), (4, 2), (2, 1.0))],
)
def test_a_box_lies_in_its_tensor(offset: tuple[int, ...], size: tuple[int, ...], strides: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="has no part of size"):
        Box("key", (4, 2), offset, size, 0, strides)
