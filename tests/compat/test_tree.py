"""One walk finds what torch's own iterators find, in their order, whatever the module has become."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_replica._compat.tree import Tree


def same(module: nn.Module) -> bool:
    tree = Tree.of(module)
    buffers = dict(module.named_buffers())
    return (
        [*map(id, tree.modules)] == [*map(id, module.modules())]
        and [*map(id, tree.parameters)] == [*map(id, module.parameters())]
        and list(tree.buffers) == list(buffers)
        and all(tree.buffers[name] is buffer for name, buffer in buffers.items())
    )


def test_it_is_what_torch_finds() -> None:
    shared = nn.BatchNorm1d(4)
    first, tied = nn.Linear(4, 4), nn.Linear(4, 4)
    module = nn.Sequential(first, shared, nn.ModuleDict({"b": tied, "a": shared}), nn.ReLU())
    tied.weight = first.weight
    module[3].register_buffer("mean", shared.running_mean)  # likewise
    module[3].register_buffer("none", None)
    module.register_parameter("absent", None)
    module.register_module("nobody", None)
    assert same(module)
    assert len(Tree.of(module).modules) == 6
    module[3] = nn.Sequential(nn.BatchNorm1d(2), nn.PReLU())
    module[0].register_buffer("late", torch.zeros(1))
    del module[1]
    assert same(module)
    assert list(Tree.of(module).buffers)[0] == "0.late"


def test_a_module_that_contains_itself() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].register_module("above", module)
    assert same(module)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 2)))


def rename(module: nn.Module) -> None:
    buffers = module[1]._buffers  # type: ignore[index]
    buffers["last"] = buffers.pop("num_batches_tracked")


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "a parameter is added": lambda module: module[2].register_parameter("more", nn.Parameter(torch.zeros(1))),
    "a parameter is replaced": lambda module: setattr(module[0], "weight", nn.Parameter(torch.zeros(4, 4))),
    "a parameter is replaced in the dict": lambda module: module[0]._parameters.update(
        bias=nn.Parameter(torch.ones(4))
    ),
    "a parameter is removed": lambda module: delattr(module[0], "bias"),
    "a buffer is replaced": lambda module: setattr(module[1], "running_mean", torch.ones(4)),
    "a buffer is renamed": rename,
    "a submodule is added": lambda module: module.append(nn.ReLU()),
    "a submodule is replaced": lambda module: setattr(module[2], "0", nn.Linear(4, 2)),
    "a submodule is replaced in the dict": lambda module: module[2]._modules.update({"0": nn.Linear(4, 2)}),
    "a submodule is removed": lambda module: delattr(module[2], "0"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str) -> None:
    module = net()
    former = Tree.of(module)
    assert Tree.of(module, former) is former
    CHANGES[change](module)
    now = Tree.of(module, former)
    assert now is not former
    assert [*map(id, now.parameters)] == [*map(id, module.parameters())]
    assert [*now.buffers] == [name for name, _ in module.named_buffers()]
    assert [*map(id, now.modules)] == [*map(id, module.modules())]
    assert Tree.of(module, now) is now


def test_another_module_has_another_tree() -> None:
    one, other = net(), net()
    assert Tree.of(other, Tree.of(one)).modules[0] is other


def test_hooks_are_those_of_now() -> None:
    module = net()
    tree = Tree.of(module)
    assert tree.hooked() == []
    handle = module[1].register_forward_pre_hook(lambda *_: None)
    assert [tree.modules[number] for number in tree.hooked()] == [module[1]]
    handle.remove()
    assert tree.hooked() == []
