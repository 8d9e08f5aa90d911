"""The structure of a model: pruned, put back, and followed by one that was built anew."""

from collections import OrderedDict
from dataclasses import asdict
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torchmetrics import MaxMetric, MeanMetric, MetricCollection, MetricTracker

from lightning_replica._compat.tree import Tree, registered
from lightning_replica.core import plain
from lightning_replica.errors import RecoveryError
from lightning_replica.state.hooks import names_of
from lightning_replica.state.structure import Original, Outline, Structure, differences, follow
from tests.state.test_reachable import Copies
from tests.support.typed import tensor_of


def model() -> nn.Sequential:
    torch.manual_seed(1)
    first = nn.Linear(4, 3)
    net = nn.Sequential(first, nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3), nn.Linear(3, 2))
    net[1].register_parameter("more", first.bias)  # shared with another module
    return net


def described(net: nn.Module) -> list[object]:
    """All that pruning changes."""
    hooks = [len(module._forward_pre_hooks) for module in net.modules()]
    plain = [sorted(name for name in vars(module) if not name.startswith("_")) for module in net.modules()]
    own = [list(module._parameters) for module in net.modules()]
    outline = Outline.of(net, Original(net))
    buffers = [name for name, _ in net.named_buffers()]
    return [hooks, plain, own, outline, buffers, list(map(id, net.parameters()))]


def prune_two(net: nn.Sequential) -> None:
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
    assert tensor_of(net[0].weight).grad is not None


def test_what_was_removed_is_pruned_again() -> None:
    net = model()
    prune_two(net)
    tensor_of(net[0].weight_orig).requires_grad_(False)  # in no shard: nobody else gives its values back
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
    trained, built, untouched = model(), model(), model()
    of_trained, of_built, of_untouched = map(Original, (trained, built, untouched))
    prune_two(trained)
    prune.remove(trained[2], "weight")
    follow(built, Outline.of(trained, of_trained), dict(trained.named_buffers()), of_built)
    assert described(built)[:-1] == described(trained)[:-1]
    follow(trained, Outline.of(untouched, of_untouched), dict(untouched.named_buffers()), of_trained)
    assert Outline.of(trained, of_trained) == Outline.of(untouched, of_untouched)


def test_any_other_difference_is_named() -> None:
    trained, built = model(), model()
    original = Original(trained)
    nn.utils.spectral_norm(trained[0])
    with pytest.raises(RecoveryError, match=r"has changed in training.*'0.weight_orig'.* has '0.weight' instead"):
        follow(built, Outline.of(trained, original), dict(trained.named_buffers()), Original(built))


class Tracked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tracker = MetricTracker(MetricCollection([MeanMetric(), MaxMetric()]), maximize=[True, True])
        self.last: nn.Module = nn.Identity()


def test_metrics_that_a_tracker_has_begun_go() -> None:
    net = Tracked()
    net.tracker.increment()
    modules = list(net.modules())
    first = Structure.of(Tree.of(net))
    net.tracker.increment()
    second = Structure.of(Tree.of(net), first)
    net.last = nn.ReLU()
    for _ in range(2):
        first.put_back(net)
        assert list(net.modules()) == modules
        assert net.tracker.n_steps == 1
        second.put_back(net)
        assert net.tracker.n_steps == 2
        assert isinstance(net.last, nn.Identity)


def test_a_tracker_that_was_built_anew_follows() -> None:
    of_trained, of_built = Tracked(), Tracked()
    trained, built = nn.Sequential(of_trained), nn.Sequential(of_built)
    originals = Original(trained), Original(built)
    for _ in range(12):
        of_trained.tracker.increment()
    follow(built, Outline.of(trained, originals[0]), {}, originals[1])
    assert Outline.of(built, originals[1]) == Outline.of(trained, originals[0])
    assert of_built.tracker.n_steps == 12


def test_another_submodule_is_named() -> None:
    trained, built = model(), model()
    original = Original(trained)
    trained.late = nn.ReLU()
    with pytest.raises(RecoveryError, match=r"have the submodules 'late', but a process.* has none instead"):
        follow(built, Outline.of(trained, original), dict(trained.named_buffers()), Original(built))
    del trained.late
    trained[3] = nn.GELU()
    with pytest.raises(RecoveryError, match=r"the submodules '3 \(torch.*GELU\)', but .* has '3 \(torch.*Linear"):
        follow(built, Outline.of(trained, original), dict(trained.named_buffers()), Original(built))


class Registered(nn.Module):
    """Registers parts more than once, and some of them only while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.first: nn.Module = nn.Linear(2, 2)
        self.heads = nn.ModuleList([self.first, nn.Linear(2, 2), nn.Linear(2, 2)])
        self.used = nn.ModuleList([self.heads[1]])
        self.aux: nn.Module | None = self.heads[2]
        self.center: Tensor | None
        self.register_buffer("center", None)
        self.register_buffer("best", torch.zeros(2))
        self.register_buffer("now", torch.zeros(2), persistent=False)
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.tied: nn.Parameter = self.frozen

    def change(self) -> None:
        """Register all of it elsewhere."""
        self.first = self.heads[1]
        self.used.append(self.heads[2])
        self.aux = None
        self.center = torch.ones(3)
        self.now = self.best
        del self.best
        self.register_buffer("late", torch.full((2,), 3.0))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def built(self) -> list[Any]:
        """Return what is registered where, by places in a list of all that there was at first."""
        heads = list(map(id, self.heads))
        tables = [
            [
                (name, heads.index(id(part)) if id(part) in heads else getattr(part, "shape", type(part)))
                for name, part in table.items()
            ]
            for module in self.modules()
            for table in registered(module)
        ]
        return [tables, sorted(self._non_persistent_buffers_set), self.tied is self.frozen]


def test_what_is_registered_elsewhere_goes_back() -> None:
    net = Registered()
    before, objects = net.built(), [*net.parameters(), *net.buffers()]
    first = Structure.of(Tree.of(net))
    net.change()
    after = net.built()
    assert after != before
    second = Structure.of(Tree.of(net), first)
    for _ in range(2):
        first.put_back(net)
        assert net.built() == before
        assert all(a is b for a, b in zip([*net.parameters(), *net.buffers()], objects, strict=True))
        second.put_back(net)
        assert net.built() == after


def test_a_replacement_registers_parts_elsewhere() -> None:
    trained, built = Registered(), Registered()
    of_trained, of_built = Original(trained), Original(built)
    heads = list(built.heads)
    trained.change()
    outline = Outline(**plain.unpack(plain.pack(asdict(Outline.of(trained, of_trained)))))
    follow(built, outline, dict(trained.named_buffers()), of_built)
    assert built.built() == trained.built()
    assert list(built.heads) == heads
    assert built.first is heads[1]
    assert Outline.of(built, of_built) == outline


def test_a_process_that_resumes_knows_what_was_registered_elsewhere() -> None:
    trained, built = Registered(), Registered()
    original = Original(trained)
    trained.first = trained.heads[1]
    found = differences(Outline.of(trained, original), Outline.of(built, Original(built)))
    assert found == {"first": "code had set it to heads.1, and in this process it is first"}


def scales(module: nn.Module, _: object, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def notes(module: nn.Module, _: object) -> None:
    """Sees what goes in."""


def test_hooks_go_back() -> None:
    """One that is registered in a step is registered once more when the step is done again; one that goes, returns."""
    net = model()
    leaves = net[1].register_forward_pre_hook(notes, with_kwargs=False)
    stays = net[3].register_full_backward_hook(lambda *_: None)
    before, structure = hooks_of(net), Structure.of(Tree.of(net))
    assert Structure.of(Tree.of(net), structure).hooks is structure.hooks
    net[0].register_forward_hook(scales, always_call=True)
    leaves.remove()
    prune_two(net)
    assert Structure.of(Tree.of(net), structure).hooks is not structure.hooks
    for _ in range(2):
        structure.put_back(net)
        assert hooks_of(net) == before
    leaves.remove()
    stays.remove()
    assert Structure.of(Tree.of(net), structure).hooks is not structure.hooks
    assert not any(map(len, hooks_of(net)))


def test_hooks_of_others_stay() -> None:
    net = model()
    prune_two(net)
    structure = Structure.of(Tree.of(net))
    ours = nn.utils.parametrizations._WeightNorm().forward
    net[1].register_forward_hook(ours)  # type: ignore[arg-type]
    net[1].register_forward_hook(scales)
    structure.put_back(net)
    assert [hook.__name__ for hook in net[1]._forward_hooks.values()] == ["forward"]
    assert len(net[0]._forward_pre_hooks) == 1


def test_hooks_of_all_modules_go_back() -> None:
    net = model()
    structure = Structure.of(Tree.of(net))
    with nn.modules.module.register_module_forward_hook(scales):  # type: ignore[arg-type]
        assert names_of(net) == {"all modules": "tests.state.test_structure.scales"}
        doubled = Structure.of(Tree.of(net), structure)
        structure.put_back(net)
        assert names_of(net) == {}
        doubled.put_back(net)
        assert len(nn.modules.module._global_forward_hooks) == 1
    assert names_of(net) == {}


def test_hooks_of_parameters_go_back() -> None:
    net = model()
    weight = tensor_of(net[0].weight)
    structure = Structure.of(Tree.of(net))
    for _ in range(2):
        weight.register_hook(lambda gradient: gradient / 2)
        structure.put_back(net)
        net(torch.ones(2, 4)).sum().backward()
        whole, weight.grad = weight.grad, None
    handle = weight.register_hook(lambda gradient: gradient / 2)
    structure = Structure.of(Tree.of(net))
    handle.remove()
    structure.put_back(net)
    net(torch.ones(2, 4)).sum().backward()
    assert weight.grad is not None
    assert whole is not None
    assert torch.equal(weight.grad, whole / 2)


def test_a_table_of_hooks_that_is_another_one() -> None:
    net = model()
    net[0].register_forward_hook(scales)
    before, structure = hooks_of(net), Structure.of(Tree.of(net))
    net[0]._forward_hooks = OrderedDict()
    structure.put_back(net)
    assert hooks_of(net) == before


def hooks_of(net: nn.Module) -> list[list[object]]:
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_forward_hooks_always_called")
    return [list(getattr(module, kind).items()) for module in net.modules() for kind in kinds]


@pytest.mark.parametrize("again", [True, False])
def test_hooks_that_a_run_lacks_after_it_resumes(again: bool) -> None:
    module: Any = L.LightningModule()
    resumed: Any = L.LightningModule()
    for each in (module, resumed):
        each.lin = nn.Linear(2, 2)
    copies, others = Copies(module), Copies(resumed)
    module.lin.register_forward_hook(noted)
    others.reachable.put_sent(plain.unpack(plain.pack(copies.reachable.saved(copies.take()))))
    if again:
        resumed.lin.register_forward_hook(noted)  # as `on_train_start` does
    others.take()
    found = others.inexact.known
    assert list(found) == ([] if again else ["hooks of lin"])
    assert again or "other ones (none) than when its checkpoint was written (tests.state" in found["hooks of lin"].why


def noted(*_: Any) -> None: ...
