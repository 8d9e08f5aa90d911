"""The same training by hand: megatron-core's schedule, and all-reduced gradients under torch's own AdamW."""

import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_replica._compat import megatron
from lightning_replica.megatron.schedule import Losses, split
from tests.megatron import job
from tests.megatron.job import LENGTH, Case
from tests.support import world
from tests.support.job import Faults
from tests.support.ranks import open_world, run_ranks
from tests.support.typed import grad_of


def by_hand(rank: int, store: Any, case: Case) -> dict[str, Any]:
    """Train as `job.run` does, with whole gradients and optimizer states on every rank."""
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    import megatron_cpu

    megatron_cpu.install()
    open_world(rank, store, case.devices)
    from megatron.core import parallel_state

    megatron.initialize(job.sizes_of(case).for_groups, 1)
    L.seed_everything(7, verbose=False)
    tokens = job.data(case)
    megatron.seed(7)
    module = job.GPT(case, Faults(case, Path()))
    module.configure_model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.0, eps=job.EPSILON)
    group = parallel_state.get_data_parallel_group()
    whole: Any = tokens
    sampler: DistributedSampler[Any] = DistributedSampler(whole, group.size(), group.rank(), seed=7)  # as Lightning's
    norms = []
    for batch in DataLoader(TensorDataset(tokens), 4, sampler=sampler):
        micro_batches = split(batch, 2)
        optimizer.zero_grad()
        chunks = megatron.chunks_of(module)
        megatron.run_schedule(
            Losses(module.forward_step), [iter(micro_batches)], chunks, len(micro_batches), LENGTH, 2, False
        )
        megatron.finalize(chunks)
        norms.append(clip(module, case, parallel_state.get_tensor_model_parallel_rank(), group))
        optimizer.step()
    return {"weights": [p.detach().flatten().tolist() for p in module.parameters()], "norms": norms}


def clip(module: torch.nn.Module, case: Case, tensor_rank: int, group: Any) -> float:
    """Average gradients over data parallel ranks, and clip them by the norm of the whole model's."""
    squares = torch.zeros((), dtype=torch.float64)
    for parameter in module.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= group.size()
        copy = getattr(parameter, "shared", False)
        if not copy and (tensor_rank == 0 or getattr(parameter, "tensor_model_parallel", False)):
            squares += parameter.grad.double().square().sum() / group.size()
    dist.all_reduce(squares)
    norm = float(squares.sqrt())
    assert case.clip is not None
    for parameter in module.parameters():
        grad_of(parameter).mul_(min(1.0, case.clip / (norm + 1e-6)))
    return norm


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 2)])
def test_weights_are_those_of_a_training_by_hand(tmp_path: Path, sizes: tuple[int, int]) -> None:
    """Sums are made in another order, so not to the last bit."""
    tensor, pipeline = sizes
    case = Case(devices=2 * tensor * pipeline, accumulate=1, epochs=1, tensor=tensor, pipeline=pipeline, plain=True)
    expected = run_ranks(case.devices, by_hand, case)
    assert all("raised" not in each for each in expected), expected
    outcome = world.run(case, tmp_path, target=job.run)
    assert outcome.code == 0, outcome.logs
    for rank, found in enumerate(outcome.ranks):
        for ours, theirs in zip(found["values"], expected[rank]["weights"], strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-4, atol=1e-5)
