"""One walk finds what torch's own iterators find, in their order, whatever the module has become."""

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
    module = nn.Sequential(nn.Linear(4, 4), shared, nn.ModuleDict({"b": nn.Linear(4, 4), "a": shared}), nn.ReLU())
    module[2]["b"].weight = module[0].weight  # tied
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
