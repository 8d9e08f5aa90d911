"""The same training by megatron-core alone: its `DistributedDataParallel` and its `DistributedOptimizer`."""

import sys
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import lightning as L
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_replica._compat import megatron
from lightning_replica.megatron.schedule import Losses, split
from tests.megatron import job
from tests.megatron.job import LENGTH, Case
from tests.support.job import Faults
from tests.support.ranks import open_world


def train(rank: int, store: Any, case: Case, instances: int) -> dict[str, Any]:
    """Train as `job.run` does, with the optimizer's state sharded ``instances`` times over all data parallel ranks."""
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    import megatron_cpu

    megatron_cpu.install()
    megatron_cpu.pass_for_cuda()
    open_world(rank, store, case.devices)
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    sizes = job.sizes_of(case).for_groups
    parallel_state.initialize_model_parallel(**sizes, num_distributed_optimizer_instances=instances)
    L.seed_everything(7, verbose=False)
    tokens = job.data(case)
    megatron.seed(7)
    module = job.GPT(case, Faults(case, Path()))
    module.configure_model()
    ours = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=False, num_distributed_optimizer_instances=instances
    )
    chunk = DistributedDataParallel(module.model.config, ours, module.model)
    chunk.broadcast_params()
    assert case.clip is not None
    adam = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        weight_decay=0.0,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_eps=job.EPSILON,
        clip_grad=case.clip,
        use_distributed_optimizer=True,
        log_num_zeros_in_grad=True,
    )
    optimizer = get_megatron_optimizer(adam, [chunk])
    group = parallel_state.get_data_parallel_group()
    whole: Any = tokens
    sampler: DistributedSampler[Any] = DistributedSampler(whole, group.size(), group.rank(), seed=7)  # as Lightning's
    norms, zeros = [], []
    for epoch in range(case.epochs):
        sampler.set_epoch(epoch)
        loader = iter(DataLoader(TensorDataset(tokens), 4, sampler=sampler))
        while batches := list(islice(loader, case.accumulate)):
            micro_batches = [each for batch in batches for each in split(batch, 2)]
            chunk.zero_grad_buffer()
            optimizer.zero_grad()
            losses = Losses(module.forward_step)
            megatron.run_schedule(
                losses, [iter(micro_batches)], [chunk], len(micro_batches), LENGTH, 2, forward_only=False
            )
            finalize_model_grads([chunk])
            _, norm, found = optimizer.step()
            norms.append(float(norm))
            zeros.append(found)
    return {"weights": [p.detach().flatten().tolist() for p in module.parameters()], "norms": norms, "zeros": zeros}
