"""The digest finds every flipped bit, its parts cover everything, and what is lawful is no alarm."""

import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_replica.chaos import flip
from lightning_replica.core.digests import Digest, digest, words_of
from lightning_replica.core.grid import Grid
from lightning_replica.errors import CorruptedShardError
from lightning_replica.sharding.guard import PARTS, Guard, regions
from lightning_replica.sharding.listing import Listing, Listings, shard_tensors
from lightning_replica.sharding.optimizer import ShardedOptimizer
from lightning_replica.sharding.settings import EngineSettings

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool, torch.complex64)


def random_bits(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    top = 2 if dtype is torch.bool else 256
    return torch.randint(top, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@settings(deadline=None)
@given(st.integers(0, 300), st.sampled_from(DTYPES), st.integers(0, 2**31), st.data())
def test_the_sum_of_the_words(numel: int, dtype: torch.dtype, seed: int, data: st.DataObject) -> None:
    tensor = random_bits(numel, dtype, seed)
    words = words_of(tensor)
    start = data.draw(st.integers(0, words))
    stop = data.draw(st.integers(start, words))
    raw = bytes_of(tensor)[8 * start : 8 * stop]
    expected = sum(int.from_bytes(raw[i : i + 8], "little") for i in range(0, len(raw), 8)) % 2**64
    assert digest(tensor, start, stop) == expected


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(1, 40), st.integers(0, 2**31), st.data())
def test_every_bit_lies_in_one_part_and_changes_its_digest_alone(
    sizes: list[int], parts: int, seed: int, data: st.DataObject
) -> None:
    tensors = [(str(i), random_bits(numel, DTYPES[i % 4], seed + i)) for i, numel in enumerate(sizes)]
    words = sum(words_of(tensor) for _, tensor in tensors)

    def digests() -> list[list[int]]:
        bounds = [words * part // parts for part in range(parts + 1)]
        found = [regions(Listing(tensors), low, high) for low, high in zip(bounds, bounds[1:], strict=False)]
        return [[region.digest() for region in part] for part in found]

    before = digests()
    chosen = data.draw(st.sampled_from(tensors))[1]
    if chosen.numel():
        bit = data.draw(st.integers(0, 8 * chosen.nbytes - 1))
        chosen.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
        assert sum(old != new for old, new in zip(before, digests(), strict=True)) == 1


@pytest.mark.parametrize("shape", [(7, 5, 3), (1000, 301), (3, 90_001), (9, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strides_make_no_difference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = random_bits(int(torch.Size(shape).numel()), dtype, 3).view(shape)
    other = tensor.transpose(0, -1).contiguous().transpose(0, -1)
    assert not other.is_contiguous() or shape[-1] == 1
    words = words_of(tensor)
    for start, stop in [(0, words), (1, words), (0, words // 2), (words // 3, words // 2)]:
        assert digest(tensor, start, stop) == digest(other, start, stop)
    # Nor does it where a tensor begins, here in the middle of a word.
    shifted = torch.cat([tensor.new_zeros(1), tensor.view(-1)])[1:]
    assert digest(tensor, 1, words) == digest(shifted, 1, words)


def sharded(make: Any = torch.optim.AdamW) -> ShardedOptimizer:
    parameters = [nn.Parameter(torch.randn(size)) for size in (37, 5, 64)]
    made = ShardedOptimizer(make(parameters, lr=0.1), parameters, [Grid.of(2, 2)], 0, EngineSettings(1000))
    update(made)
    return made


def update(optimizer: ShardedOptimizer) -> None:
    for buffers in optimizer.buffers:
        buffers.grads.normal_()
        buffers.used = [True] * len(buffers.parameters)
    optimizer.update(lambda _: None)


def test_all_of_the_state_is_watched() -> None:
    names = {name for name, _ in shard_tensors([sharded()])}
    assert names == {"main", "step", "exp_avg", "exp_avg_sq"}
    assert {name for name, _ in shard_tensors([sharded(torch.optim.SGD)])} == {"main"}


@pytest.mark.parametrize("seed", range(20))
def test_a_flip_is_found_at_once_or_in_its_turn(seed: int) -> None:
    optimizers = [sharded()]
    full, sampled = Guard("full", 1, 0), Guard("sampled", 1, 0)
    full.renew(4, optimizers)
    sampled.renew(4, optimizers)
    whole = [Guard("sampled", 0, 0).digest(step, optimizers) for step in range(PARTS)]
    what = flip_bit(optimizers, seed)
    with pytest.raises(CorruptedShardError, match=f"rank 1 is corrupted at step 4: .*at rest .{what.split()[-1]}:"):
        full.check()
    assert full.found
    seen = [Guard("sampled", 0, 0).digest(step, optimizers) for step in range(PARTS)]
    changed = [step for step in range(PARTS) if seen[step] != whole[step]]
    assert len(changed) == 1
    found = sampled.digest(4, optimizers)
    assert found is not None
    assert found.changed == (changed == [4])


def flip_bit(optimizers: list[ShardedOptimizer], seed: int) -> str:
    return flip.flip_bit(list(shard_tensors(optimizers)), seed)


def touch(optimizers: list[ShardedOptimizer]) -> None:
    """What user code may do to its optimizer."""
    for state in optimizers[0].optimizer.state.values():
        state["exp_avg"].mul_(2)


def replace(optimizers: list[ShardedOptimizer]) -> None:
    for state in optimizers[0].optimizer.state.values():
        state["exp_avg"] = state["exp_avg"] * 2


def clear(optimizers: list[ShardedOptimizer]) -> None:
    optimizers[0].optimizer.state.clear()


def adopt(optimizers: list[ShardedOptimizer]) -> None:
    for buffers in optimizers[0].buffers:
        buffers.params.zero_()
        buffers.main_from_params()


@pytest.mark.parametrize("lawful", [touch, replace, clear, adopt])
def test_what_torch_has_done_is_no_alarm(lawful: Any) -> None:
    optimizers = [sharded()]
    guard = Guard("full", 0, 0)
    guard.renew(1, optimizers)
    lawful(optimizers)
    guard.check(after_hooks=True)
    found = guard.digest(1, optimizers)
    assert found is not None
    assert not found.changed
    update(optimizers[0])
    guard.renew(2, optimizers)
    flip_bit(optimizers, 1)
    with pytest.raises(CorruptedShardError):
        guard.check()


@pytest.mark.parametrize("lawful", [touch, replace, clear, adopt, update])
def test_the_shard_is_listed_anew_where_it_has_other_tensors(lawful: Any) -> None:
    optimizers = [sharded()]
    listings = Listings()
    before = listings.of(optimizers)
    assert listings.of(optimizers) is before
    lawful(optimizers if lawful is not update else optimizers[0])
    after = listings.of(optimizers)
    assert (after is before) == (lawful in (touch, adopt, update))
    rows = [(name, tensor, 0, words_of(tensor)) for name, tensor in shard_tensors(optimizers) if tensor.numel()]
    found = list(after.parts(0, after.words))
    assert [(name, id(tensor), low, high) for name, tensor, low, high in found] == [
        (name, id(tensor), low, high) for name, tensor, low, high in rows
    ]


def test_a_listing_keeps_nothing_alive() -> None:
    optimizers = [sharded()]
    listings = Listings()
    listings.of(optimizers)
    gone = [weakref.ref(tensor) for name, tensor in shard_tensors(optimizers) if name == "exp_avg"]
    replace(optimizers)
    assert all(ref() is None for ref in gone)
    for _ in range(20):  # one after the other may get the identity of one that is gone
        listings.of(optimizers)
        replace(optimizers)
        found = listings.of(optimizers).parts(0, 10**6)
        alive = {id(tensor) for _, tensor in shard_tensors(optimizers)}
        assert alive == {id(tensor) for _, tensor, _, _ in found}


def test_what_torch_does_not_see_is_no_alarm_if_all_peers_did_it() -> None:
    optimizers = [sharded()]
    guard = Guard("full", 0, 0)
    for step in range(1, 3):
        guard.renew(step, optimizers)
        for state in optimizers[0].optimizer.state.values():
            state["exp_avg"].data.mul_(2)
        if step == 2:
            guard.check(after_hooks=True)  # known by now
        found = guard.digest(step, optimizers)
        assert found is not None
        assert found.changed == (step == 1)
        guard.compare(step, {0: found, 1: found})
    flip_bit(optimizers, 1)
    with pytest.raises(CorruptedShardError):  # between commit and update there are no hooks
        guard.check()


def test_a_change_is_remembered_until_the_peers_have_judged_it() -> None:
    optimizers = [sharded()]
    guard = Guard("full", 0, 0)
    guard.renew(1, optimizers)
    right = guard.digest(1, optimizers)
    flip_bit(optimizers, 1)
    guard.digest(1, optimizers)
    update(optimizers[0])  # as manual optimization does before its commit
    guard.renew(1, optimizers)
    found = guard.digest(1, optimizers)
    assert right is not None
    assert found is not None
    assert found.changed
    with pytest.raises(CorruptedShardError, match="at rest"):
        guard.check(after_hooks=True)
    with pytest.raises(CorruptedShardError, match="at rest"):
        guard.compare(1, {0: found, 1: right})
    guard.reset(1, optimizers)
    assert not guard.found
    guard.check()


@pytest.mark.parametrize("after", [0, PARTS, PARTS + 1])
def test_code_that_writes_to_weights_is_suspected(after: int) -> None:
    """Only until all of the shard has been compared since."""
    optimizers = [sharded()]
    guard = Guard("sampled", rank=0, shard=0)
    guard.renew(1, optimizers)
    guard.adopt(2, optimizers)
    adopt(optimizers)
    found = guard.digest(2 + after, optimizers)
    assert found is not None
    with pytest.raises(CorruptedShardError) as error:
        guard.compare(2 + after, {0: found, 1: Digest(found.words, found.value + 1, found.changed)})
    told = "Your code has written to weights (seen at step 2): it must write the same values on all ranks"
    assert (told in str(error.value)) == (after <= PARTS)


def test_off_does_nothing() -> None:
    optimizers = [sharded()]
    guard = Guard("off", 0, 0)
    guard.renew(1, optimizers)
    flip_bit(optimizers, 1)
    guard.keep(1, optimizers)
    assert guard.digest(1, optimizers) is None
    guard.check()


def test_an_empty_shard() -> None:
    guard = Guard("sampled", 0, 0)
    guard.renew(0, [])
    assert guard.digest(0, []) == Digest(0, 0, False)
