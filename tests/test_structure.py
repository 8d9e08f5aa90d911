"""The structure of a model: pruned, put back, and followed by one that was built anew."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from lightning_replica._compat.tree import Tree
from lightning_replica.errors import RecoveryError
from lightning_replica.structure import Structure, follow, names_of


def model() -> nn.Module:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3), nn.Linear(3, 2))
    net[1].register_parameter("more", net[0].bias)  # shared with another module
    return net


def described(net: nn.Module) -> list[object]:
    """All that pruning changes."""
    hooks = [len(module._forward_pre_hooks) for module in net.modules()]
    plain = [sorted(name for name in vars(module) if not name.startswith("_")) for module in net.modules()]
    own = [list(module._parameters) for module in net.modules()]
    buffers = [name for name, _ in net.named_buffers()]
    return [hooks, plain, own, names_of(net), buffers, list(map(id, net.parameters()))]


def prune_two(net: nn.Module) -> None:
    prune.l1_unstructured(net[0], "weight", 0.5)
    prune.l1_unstructured(net[2], "weight", 1)


def test_the_first_pruning_is_undone() -> None:
    net = model()
    before, structure = described(net), Structure.of(Tree.of(net))
    prune_two(net)
    assert described(net) != before
    structure.put_back(net)
    assert described(net) == before
    net(torch.ones(2, 4)).sum().backward()
    assert net[0].weight.grad is not None


def test_what_was_removed_is_pruned_again() -> None:
    net = model()
    prune_two(net)
    net[0].weight_orig.requires_grad_(False)  # in no shard: nobody else gives its values back
    before, structure = described(net), Structure.of(Tree.of(net))
    values = [tensor.clone() for tensor in (*net.parameters(), *net.buffers())]
    prune.random_unstructured(net[0], "weight", 0.5)
    prune.l1_unstructured(net[3], "bias", 1)
    for module in (net[0], net[2]):
        prune.remove(module, "weight")
    structure.put_back(net)
    assert described(net) == before
    assert all(map(torch.equal, values, (*net.parameters(), *net.buffers())))


def test_one_that_was_built_anew_follows() -> None:
    trained, built = model(), model()
    prune_two(trained)
    prune.remove(trained[2], "weight")
    follow(built, names_of(trained), dict(trained.named_buffers()))
    assert described(built)[:-1] == described(trained)[:-1]
    follow(trained, names_of(model()), dict(model().named_buffers()))
    assert names_of(trained) == names_of(model())


def test_any_other_difference_is_named() -> None:
    trained = model()
    nn.utils.spectral_norm(trained[0])
    with pytest.raises(RecoveryError, match=r"has changed in training.*'0.weight_orig'.* has '0.weight' instead"):
        follow(model(), names_of(trained), dict(trained.named_buffers()))
