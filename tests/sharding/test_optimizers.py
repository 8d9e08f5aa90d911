"""torch's own list of optimizers and their options, sharded, against the unsharded optimizer on the same gradients.

Every element of a gradient comes from one rank alone (`exact_share`), so that the average is exact and nothing but the
update itself can differ.
"""

import json
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_replica.errors import ConfigurationError
from lightning_replica.sharding.optimizer import ELEMENT_WISE, check_optimizer
from lightning_replica.sharding.piece import is_like
from lightning_replica.sharding.state import ShardedState
from tests.support.ranks import run_ranks
from tests.support.sharded import (
    digest,
    distance,
    exact_gradients,
    exact_share,
    feed,
    make_state,
    open_groups,
    same_bits,
    train_step,
)

SHAPES = [(33, 31), (50,), (7, 50), (), (1,), (3,), (0,), (5, 3, 3, 3)]
MATRICES = [(33, 31), (7, 50), (50, 7), (1, 9), (16, 16)]  # Muon takes nothing else
REFUSED = ("LBFGS", "SparseAdam")
# torch itself cannot step a parameter on the CPU with these.
IMPOSSIBLE = {"differentiable": "a leaf Variable that requires grad", "capturable": "must be on supported devices"}
Config = tuple[str, dict[str, Any]]


@cache
def torch_list() -> list[Config]:
    """Every optimizer and input that torch lists for the CPU, in every implementation that the class has."""
    from torch.testing._internal.common_optimizers import optim_db

    found = []
    for info in optim_db:
        flags: list[str] = [flag for flag in ("foreach", "fused", "differentiable") if flag in info.supported_impls]
        flags += ["capturable"] if info.has_capturable_arg else []
        for each in info.optim_inputs_func(device="cpu"):
            plain = {key: {"tensor": v.item()} if isinstance(v, torch.Tensor) else v for key, v in each.kwargs.items()}
            found += [(info.name, plain), *((info.name, {**plain, flag: True}) for flag in flags)]
    return found


def build(name: str, kwargs: dict[str, Any], parameters: list[nn.Parameter]) -> Optimizer:
    """Two param groups, the second with twice the learning rate."""
    kwargs = {key: torch.tensor(v["tensor"]) if isinstance(v, dict) else v for key, v in kwargs.items()}
    if name in REFUSED:
        return getattr(torch.optim, name)(parameters, **kwargs)
    groups = [{"params": parameters[::2]}, {"params": parameters[1::2]}]
    optimizer: Optimizer = getattr(torch.optim, name)(groups, **kwargs)
    optimizer.param_groups[1]["lr"] = optimizer.param_groups[1]["lr"] * 2
    return optimizer


def make_parameters(name: str) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = MATRICES if name == "Muon" else SHAPES
    if name == "Adafactor":  # it divides by the number of elements
        shapes = [shape for shape in shapes if 0 not in shape]
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def compare(groups: Any, name: str, kwargs: dict[str, Any], partition: str) -> dict[str, Any]:
    ours, theirs = make_parameters(name), make_parameters(name)
    our_optimizer, reference = build(name, kwargs, ours), build(name, kwargs, theirs)
    state = make_state(groups, ours, our_optimizer, partition=partition, bucket_bytes=2000)
    for step in range(3):
        gradients = exact_gradients([p.shape for p in ours], [p.dtype for p in ours], step)
        shares = [exact_share(each, groups) for each in gradients]
        train_step(state, partial(feed, ours, shares))
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient
        reference.step()
    both = list(zip(ours, theirs, strict=True))
    result = {
        "same": all(same_bits(a, b) for a, b in both),
        "distance": max(distance(a, b) for a, b in both),
        "state": compare_state(state, ours, theirs, reference),
        "buckets": len(state.buffers[0].layout.buckets),
        "digest": digest(state),
    }
    state.release()
    return result


def compare_state(state: ShardedState, ours: Any, theirs: Any, reference: Optimizer) -> dict[str, float]:
    """For every entry of the pieces' state that is not the same part of the unsharded state: how far it is off."""
    twin = {id(a): b for a, b in zip(ours, theirs, strict=True)}
    wrong: dict[str, float] = {}
    for piece in state.optimizers[0].pieces:
        entries, expected = state.optimizers[0].optimizer.state[piece.parameter], reference.state[twin[id(piece.whole)]]
        if entries.keys() != expected.keys():
            wrong[f"{sorted(entries)} != {sorted(expected)}"] = float("inf")
        for key, value in expected.items():
            if is_like(key, value, piece.whole):
                value = piece.buffers.split(piece.where, value)
            if not isinstance(value, torch.Tensor):
                wrong |= {} if entries[key] == value else {key: float("inf")}
            elif not same_bits(entries[key], value):
                wrong[key] = max(wrong.get(key, 0.0), distance(entries[key], value))
    return wrong


def sweep(rank: int, store: Any, configs: list[Config], partition: str) -> dict[str, Any]:
    groups = open_groups(rank, store, 4, 2)
    return {json.dumps(config): compare(groups, *config, partition) for config in configs}


def configs_for(partition: str) -> list[Config]:
    """All that torch tests; of optimizers that may be cut anywhere, every fourth for whole parameters."""
    found = [(name, kwargs) for name, kwargs in torch_list() if name not in REFUSED and not IMPOSSIBLE & kwargs.keys()]
    anywhere = [config for config in found if issubclass(getattr(torch.optim, config[0]), ELEMENT_WISE)]
    assert len(anywhere) > 150
    if partition == "element":
        return anywhere
    return [config for config in found if config not in anywhere] + anywhere[::4]


@pytest.mark.parametrize("partition", ["element", "parameter"])
def test_every_optimizer_of_torch_updates_as_unsharded(partition: str) -> None:
    configs = configs_for(partition)
    assert {name for name, _ in configs} >= {cls.__name__ for cls in ELEMENT_WISE}
    ranks = run_ranks(4, sweep, configs, partition, timeout_s=200)
    for name, kwargs in configs:
        for result in (rank[json.dumps([name, kwargs])] for rank in ranks):
            case = name, kwargs, result
            assert result["buckets"] > 1, case
            if partition == "element" and kwargs.get("fused") and name in ("SGD", "Adam", "AdamW"):
                # torch's fused CPU kernels round the last elements of a tensor, fewer than a vector, differently
                # from the others (no fused multiply-add), and pieces end where parameters do not.
                assert result["distance"] < 1e-7, case
                assert all(off < 1e-6 for off in result["state"].values()), case
            else:
                assert result["same"], case
                assert not result["state"], case
    # Peers agree to the last bit; the shards are different ones.
    digests = [[rank[json.dumps(config)]["digest"] for config in configs] for rank in ranks]
    assert digests[0] == digests[2]
    assert digests[1] == digests[3]
    assert all(a != b for a, b in zip(digests[0], digests[1], strict=True))


def test_what_torch_cannot_do_on_the_cpu_either() -> None:
    tried = 0
    for name, kwargs in torch_list():
        for flag in IMPOSSIBLE.keys() & kwargs.keys():
            parameters = make_parameters(name)
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            with pytest.raises((RuntimeError, AssertionError), match=IMPOSSIBLE[flag]):
                build(name, kwargs, parameters).step()
            tried += 1
    assert tried > 100


def test_every_input_of_the_others_is_refused_by_name() -> None:
    refused = [config for config in torch_list() if config[0] in REFUSED]
    assert {name for name, _ in refused} == set(REFUSED)
    for name, kwargs in refused:
        for partition in ("element", "parameter"):
            with pytest.raises(ConfigurationError, match=f"cannot shard {name}: "):
                check_optimizer(build(name, kwargs, make_parameters(name)), partition)


def test_torch_has_no_optimizer_that_nobody_thought_of() -> None:
    names = {cls.__name__ for cls in ELEMENT_WISE} | {*REFUSED, "Muon", "Adafactor"}
    assert {name for name, _ in torch_list()} <= names
