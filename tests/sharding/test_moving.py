"""What an optimizer holds, moved to a peer or taken back: nothing may be missing for any optimizer of torch."""

import random
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from lightning_replica.core import plain
from lightning_replica.core.grid import Grid
from lightning_replica.sharding import moving
from lightning_replica.sharding.backup import Backup
from lightning_replica.sharding.optimizer import ELEMENT_WISE
from lightning_replica.sharding.own_attributes import Watch, attributes_of, attributes_of_shard, watch_of
from lightning_replica.sharding.state import ShardedState
from tests.sharding.test_optimizers import IMPOSSIBLE, REFUSED, build, make_parameters, torch_list
from tests.support.sharded import digest, new_state


def possible() -> list[tuple[str, dict[str, Any]]]:
    return [(name, kwargs) for name, kwargs in torch_list() if name not in REFUSED and not IMPOSSIBLE & kwargs.keys()]


def make(rank: int, name: str, kwargs: dict[str, Any]) -> ShardedState:
    parameters = make_parameters(name)
    partition = "element" if issubclass(getattr(torch.optim, name), ELEMENT_WISE) else "parameter"
    return new_state(
        Grid.of(4, 2), rank, parameters, [build(name, kwargs, parameters)], bucket_bytes=2000, partition=partition
    )


def update(state: ShardedState, seed: int) -> None:
    """A step of the own shard with gradients that are not those of any parameter alone; needs no other rank."""
    for buffers in state.buffers:
        buffers.used = [True] * len(buffers.parameters)
        buffers.grads.copy_(torch.randn(buffers.grads.shape, generator=torch.Generator().manual_seed(seed)))
    for optimizer in state.optimizers:
        optimizer.update(lambda gradients: None)


def move(source: ShardedState, target: ShardedState) -> None:
    manifest, tensors = source.export_shard()
    arriving = iter([tensor.clone() for tensor in tensors])

    def receive(tensor: torch.Tensor) -> None:
        tensor.copy_(next(arriving))

    target.import_shard(plain.unpack(plain.pack(manifest)), receive)
    assert next(arriving, None) is None


def test_every_optimizer_moves_to_a_peer_and_goes_on_there() -> None:
    for name, kwargs in possible():
        source, target = make(0, name, kwargs), make(2, name, kwargs)
        for seed in (1, 2):
            update(source, seed)
        update(target, 3)  # something else
        assert digest(source) != digest(target), (name, kwargs)
        move(source, target)
        assert digest(source) == digest(target), (name, kwargs)
        for state in (source, target):
            update(state, 4)
        assert digest(source) == digest(target), (name, kwargs)


def test_large_tensors_are_received_where_they_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "_LARGE_BYTES", 300)
    source, target = (make(rank, "AdamW", {"lr": 0.1}) for rank in (0, 2))
    update(source, 1)
    manifest, tensors = source.export_shard()
    own = {tensor.data_ptr() for optimizer in source.optimizers for tensor in optimizer.state()[0].values()}
    sent = [tensor.data_ptr() in own for tensor in tensors]
    arriving, filled = iter([tensor.clone() for tensor in tensors]), []
    target.import_shard(manifest, lambda tensor: filled.append(tensor.copy_(next(arriving))))
    held = {tensor.data_ptr() for optimizer in target.optimizers for tensor in optimizer.state()[0].values()}
    assert [tensor.data_ptr() in held for tensor in filled] == sent
    assert {tensor.nbytes >= 300 for tensor, stays in zip(tensors, sent, strict=True) if stays} == {True}
    assert 0 < sum(sent) < len(sent)
    assert digest(source) == digest(target)


def test_every_optimizer_can_be_taken_back() -> None:
    for name, kwargs in possible():
        state, untouched = make(1, name, kwargs), make(1, name, kwargs)
        for steps in range(2):  # from the first step on, when most have no state yet
            backup = Backup(state.optimizers, nullcontext())
            backup.keep()
            before = digest(state)
            update(state, 10)
            assert digest(state) != before, (name, kwargs)
            backup.restore()
            assert digest(state) == before, (name, kwargs)
            for each in (state, untouched):
                update(each, steps)
            assert digest(state) == digest(untouched), (name, kwargs)


def test_a_parameter_that_was_frozen_again_moves_too() -> None:
    def build_one(rank: int) -> tuple[ShardedState, list[nn.Parameter]]:
        parameters = [nn.Parameter(torch.ones(30)), nn.Parameter(torch.ones(40), requires_grad=False)]
        return new_state(Grid.of(2, 2), rank, parameters, [AdamW(parameters)]), parameters

    (source, theirs), (target, ours) = build_one(0), build_one(1)
    theirs[1].requires_grad_(True)
    source.follow_groups()
    update(source, 1)
    theirs[1].requires_grad_(False)
    move(source, target)
    assert digest(source) == digest(target)
    assert [p.requires_grad for p in ours] == [True, False]
    ours[1].requires_grad_(True)
    (ours[0].sum() + ours[1].sum()).backward()
    (reducer,) = target.gradients._reducers.values()
    assert all(id(buffers) in reducer.private for buffers in target.buffers)  # both are watched


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_that_user_code_wrote_are_taken_where_they_differ(dtype: torch.dtype) -> None:
    parameters = [nn.Parameter(torch.ones(40, dtype=dtype))]
    state = new_state(Grid.of(2, 2), 0, parameters, [AdamW(parameters, lr=1e-3)], shared_memory=False)
    buffers = state.buffers[0]
    update(state, 1)
    buffers.params_from_main()
    before = buffers.main.clone()
    state.begin_window(weights_may_differ=True)
    assert torch.equal(buffers.main, before)  # 32 bits are not rounded to 16 for nothing
    with torch.no_grad():
        parameters[0][7] = 5.0
    state.begin_window(weights_may_differ=True)
    written = buffers.layout.world[0].start + 7
    assert buffers.main[written] == 5.0
    assert torch.equal(buffers.main != before, torch.arange(len(before)) == written)


class Counts(AdamW):
    """Keeps a counter and more beside its state, and its updates depend on them."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.count, self.seen, self.mean = 0, list[int](), torch.zeros(2)
        self.first = [parameter for group in self.param_groups for parameter in group["params"]]
        self.file: Any = object()

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        self.seen.append(self.count)
        self.mean += self.count
        for group in self.param_groups:
            group["lr"] = 0.1 / (len(self.seen) + float(self.mean.sum()))
        return super().step(closure)


class CountsTurns(Counts):
    """Begins to change an attribute that is no plain data."""

    def step(self, closure: Any = None) -> Any:
        self.turns: Any = [object()]
        return super().step(closure)


def with_counts(rank: int, **settings: Any) -> tuple[ShardedState, Counts]:
    parameters = [nn.Parameter(torch.ones(30)), nn.Parameter(torch.ones(7, 3))]
    optimizer = Counts(parameters)
    return new_state(Grid.of(4, 2), rank, parameters, [optimizer], bucket_bytes=2000, **settings), optimizer


def test_own_attributes_of_an_optimizer_move_with_its_shard() -> None:
    (source, _), (target, optimizer) = with_counts(0), with_counts(2)
    own = optimizer.first
    for seed in (1, 2):
        update(source, seed)
    source.step = 2
    move(source, target)
    assert (optimizer.count, optimizer.seen, optimizer.mean.tolist()) == (2, [1, 2], [3.0, 3.0])
    assert optimizer.first is own
    update(source, 3)
    update(target, 3)
    assert digest(source) == digest(target)


def test_own_attributes_that_cannot_be_sent_are_named() -> None:
    (source, _), (target, _) = with_counts(0), with_counts(2)
    told: list[str] = []
    target._report = lambda name, why, scope="fault": told.append(name)
    update(source, 1)
    source.step = 2
    move(source, target)
    assert told == ["optimizer 0.file"]


def test_own_attributes_of_an_optimizer_go_back_with_a_batch() -> None:
    state, optimizer = with_counts(0, manual=True)
    update(state, 1)
    backup = Backup(state.optimizers, nullcontext())
    backup.keep()
    update(state, 2)
    update(state, 3)
    backup.restore()
    assert (optimizer.count, optimizer.seen, optimizer.mean.tolist()) == (1, [1], [1.0, 1.0])


class Keeps(AdamW):
    """Keeps what no plain data can hold, and what its first update makes."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.by_parameter = {parameter: 0 for group in self.param_groups for parameter in group["params"]}
        self.rule = Rule()

    def step(self, closure: Any = None) -> Any:
        self.made = getattr(self, "made", 0) + 1
        return super().step(closure)


class Rule:
    """Can be called, and may keep something."""

    def __call__(self) -> None: ...


def test_own_attributes_that_refer_to_parameters_or_can_be_called_are_named() -> None:
    found = attributes_of(Keeps([nn.Parameter(torch.ones(3))]))
    assert (found.packed, found.left) == ({}, ["by_parameter", "rule"])


def test_what_an_update_has_made_goes_again_with_a_batch_that_goes_back() -> None:
    parameters = [nn.Parameter(torch.ones(30))]
    optimizer = Keeps(parameters)
    state = new_state(Grid.of(4, 2), 0, parameters, [optimizer], bucket_bytes=2000, manual=True)
    backup = Backup(state.optimizers, nullcontext())
    backup.keep()
    update(state, 1)
    backup.restore()
    assert not hasattr(optimizer, "made")
    assert list(optimizer.by_parameter) == parameters
    assert backup.not_restored == ["optimizer 0.by_parameter", "optimizer 0.rule"]


class Written(AdamW):
    """Has an attribute that updates change, and one that code outside of them changes."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.updates, self.scales, self.outside = [0], {"a": torch.zeros(2)}, [0]
        self.unseen: Any = deque([0])

    def step(self, closure: Any = None) -> Any:
        self.updates[0] += 1
        self.unseen.append(1)
        self.scales["a"].add_(1)
        return super().step(closure)


def test_which_attributes_are_the_ranks() -> None:
    parameters = [nn.Parameter(torch.ones(30))]
    optimizer = Written(parameters)
    state = new_state(Grid.of(4, 2), 0, parameters, [optimizer], bucket_bytes=2000)
    watch: Any = watch_of(optimizer)
    update(state, 1)
    assert not {"updates", "scales", "outside", "unseen"} & {*watch.of_rank()}
    assert {"defaults", "_optimizer_step_post_hooks"} <= {*watch.of_rank()}
    assert watch.new == set()
    optimizer.outside.append(1)
    assert watch.new == {"outside"}
    update(state, 2)
    assert watch.new == set()
    assert {each for each in watch.of_rank() if not each.startswith("_")} == {"outside", "defaults"}
    assert watch.of_both == set()
    optimizer.updates[0] += 1
    assert "updates" not in watch.of_rank()
    assert watch.of_both == {"updates"}


class Within(SGD):
    """Has an optimizer of its own, and an object."""

    def __init__(self, parameters: Any, steps: bool) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.steps = steps
        self.inner = SGD(self.param_groups)
        self.inner.param_groups = self.param_groups
        self.helper = SimpleNamespace(turns=[0])

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure) if self.steps else super().step(closure)


def with_an_inner_one(steps: bool) -> tuple[ShardedState, Within]:
    parameters = [nn.Parameter(torch.ones(30))]
    optimizer = Within(parameters, steps)
    return new_state(Grid.of(4, 2), 0, parameters, [optimizer], bucket_bytes=2000), optimizer


def test_an_optimizer_in_an_optimizer_that_other_code_steps_belongs_to_the_rank() -> None:
    state, optimizer = with_an_inner_one(steps=False)
    update(state, 1)
    assert attributes_of_shard(optimizer).left == ["inner", "helper"]
    (parameter,) = state.trained
    optimizer.inner.state[parameter]["momentum_buffer"] = torch.ones(30)
    optimizer.helper.turns.append(1)
    watch: Any = watch_of(optimizer)
    assert {"inner", "helper"} <= {*watch.of_rank()}
    optimizer.inner.state[parameter]["momentum_buffer"].add_(1)
    assert attributes_of_shard(optimizer).left == []
    update(state, 2)
    assert watch.of_both == set()
    assert watch.lost() == []


def test_an_optimizer_in_an_optimizer_that_updates_step_is_named() -> None:
    state, optimizer = with_an_inner_one(steps=True)
    watch: Any = watch_of(optimizer)
    update(state, 1)
    assert not {"inner", "helper"} & {*watch.of_rank()}
    assert watch.lost() == ["inner"]
    update(state, 2)
    assert watch.lost() == []


def test_an_optimizer_in_an_optimizer_that_has_the_same_state_is_sent_with_that() -> None:
    state, optimizer = with_an_inner_one(steps=True)
    optimizer.inner.state = optimizer.state
    watch: Any = watch_of(optimizer)
    update(state, 1)
    assert watch.lost() == []
    assert len(state.optimizers[0].state()[0]) == 1


class Drawn:
    __slots__ = ("turns",)

    def __init__(self) -> None:
        self.turns = 0


def draw_slots(value: Drawn) -> None:
    value.turns += 1


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "deque": (lambda: deque([0]), lambda value: value.append(1)),
    "set": (lambda: {0}, lambda value: value.add(1)),
    "array": (lambda: np.zeros(2), lambda value: value.__iadd__(1)),
    "bytearray": (lambda: bytearray(2), lambda value: value.append(1)),
    "generator": (torch.Generator, lambda value: torch.rand(1, generator=value)),
    "random": (lambda: random.Random(1), lambda value: value.random()),
    "generator of NumPy": (lambda: np.random.default_rng(1), lambda value: value.random()),
    "older generator of NumPy": (lambda: np.random.RandomState(1), lambda value: value.rand()),
    "slots": (Drawn, draw_slots),
    "layer": (lambda: nn.Linear(2, 2), lambda value: value.weight.mul_(2)),
    "statistics of a layer": (lambda: nn.BatchNorm1d(2), lambda value: value.running_mean.add_(1)),
    "copies of parameters": (lambda: [nn.Parameter(torch.ones(3))], lambda value: value[0].mul_(2)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_attributes_that_are_seen_to_change(kind: str) -> None:
    make, change = KINDS[kind]
    state, optimizer = with_an_inner_one(steps=False)
    held: Any = optimizer
    held.it = make()
    watch: Any = watch_of(optimizer)
    update(state, 1)
    assert "it" in watch.of_rank()  # it was not there when the optimizer was sharded
    outer = Watch(optimizer)
    assert "it" not in outer.of_rank()
    with torch.no_grad():
        change(held.it)
    assert "it" in outer.of_rank_by_now
    assert outer.new == {"it"}  # to ask does not note it
    assert "it" in outer.of_rank()
    assert outer.new == set()


def test_a_rank_that_sends_its_shard_still_knows_what_was_written_for_the_first_time() -> None:
    state, optimizer = with_an_inner_one(steps=False)
    watch: Any = watch_of(optimizer)
    update(state, 1)
    optimizer.helper.turns.append(1)
    state.export_shard()
    assert watch.new == {"helper"}


def test_what_was_plain_data_and_is_no_longer_is_named() -> None:
    state, optimizer = with_counts(0)
    watch: Any = watch_of(optimizer)
    optimizer.mean = torch.zeros(2)
    told = []
    for turn in range(1, 9):
        if turn == 3:
            optimizer.seen.append(object())  # type: ignore[arg-type]
        update(state, turn)
        told += watch.lost()
    assert told == ["seen"]


def test_attributes_with_many_items_are_named_unless_they_are_seen_to_change() -> None:
    state, optimizer = with_an_inner_one(steps=False)
    optimizer.helper.turns.extend([0] * 2000)
    watch: Any = watch_of(optimizer)
    watch.settle()
    assert watch.unseen() == ["helper"]
    assert watch.unseen() == []
    optimizer.helper.turns.extend([0])
    watch.of_rank()
    assert watch.unseen() == []
    update(state, 1)


def test_the_model_that_an_optimizer_trains_is_none_of_its_attributes() -> None:
    layers = nn.Sequential(*(nn.BatchNorm1d(2) for _ in range(150)))
    optimizer: Any = SGD(layers.parameters(), lr=0.1)
    optimizer.model = layers
    watch = Watch(optimizer)
    with torch.no_grad():
        layers[0].running_mean.add_(1)  # type: ignore[operator]
        layers[0].weight.add_(1)  # type: ignore[operator]
    assert watch.new == set()
    assert watch.unseen() == []


def test_what_later_updates_begin_to_change_is_named_at_once() -> None:
    state, optimizer = with_counts(0)
    watch: Any = watch_of(optimizer)
    told = []
    for turn in range(1, 7):
        if turn == 5:
            optimizer.seen.append(object())  # type: ignore[arg-type]
            optimizer.__class__ = CountsTurns
        update(state, turn)
        told.append(watch.lost())
    assert told == [[], [], [], [], ["seen", "turns"], []]
