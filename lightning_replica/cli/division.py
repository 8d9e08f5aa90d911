"""A job whose model is divided among ranks, as the jobs of the grids that one rank is in. Pure functions.

Each rank has 1 / (TP x PP) of the model, and 1 / (ETP x EP x PP) of the experts: an equal share, as if layers and the
embedding were divided evenly. What tensor ranks and stages send each other, activations, is not counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from lightning_replica.cli import costs
from lightning_replica.errors import ConfigurationError
from lightning_replica.megatron.sizes import ParallelSizes


@dataclass(frozen=True)
class Division:
    """How a model is divided.

    Attributes:
        sizes: The sizes of model parallelism.
        expert_parameters: How many of the model's elements belong to experts.
    """

    sizes: ParallelSizes
    expert_parameters: int = 0

    @property
    def is_none(self) -> bool:
        """Whether every rank has the whole model."""
        return self.sizes == ParallelSizes() and not self.expert_parameters


def parts(job: costs.Job, division: Division) -> list[costs.Job]:
    """Return what a rank has of a model: the jobs of the grids that it is in, as if they were alone.

    Raises:
        ConfigurationError: If the sizes do not fit to the job.
    """
    sizes, experts = division.sizes, division.expert_parameters
    if division.is_none:
        return [job]
    if not 0 <= experts < job.parameters:
        raise ConfigurationError(
            f"expert_params={experts} must be less than params={job.parameters}, which counts them, too."
        )
    grids = sizes.grids(job.ranks, job.replicas, 1).grids_of(0)
    of_rank = sizes.tensor_model_parallel_size * sizes.pipeline_model_parallel_size
    found = [replace(job, ranks=grids[0].size, parameters=max(1, (job.parameters - experts) // of_rank))]
    if experts:
        of_rank = sizes.experts_size * sizes.pipeline_model_parallel_size
        found.append(replace(job, ranks=grids[-1].size, parameters=max(1, experts // of_rank)))
    return found


def memory(jobs: Sequence[costs.Memory]) -> costs.Memory:
    """Return the sum of what a rank holds for each of its grids."""
    return costs.Memory(**{each.name: sum(getattr(job, each.name) for job in jobs) for each in fields(costs.Memory)})


def of_stage(job: costs.Job, division: Division) -> costs.Job:
    """Return the job of one stage, whose ranks together send gradients and parameters to the other nodes."""
    stages = division.sizes.pipeline_model_parallel_size
    return replace(job, ranks=job.ranks // stages, parameters=max(1, job.parameters // stages))
