"""What a rank has of a model of megatron-core, and whether the model is divided as the strategy says."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from lightning_replica._compat import megatron
from lightning_replica.checkpoint.boxes import Whole
from lightning_replica.errors import ConfigurationError
from lightning_replica.megatron.sizes import ParallelSizes
from lightning_replica.megatron.tensor_places import places_in
from lightning_replica.trainer.model_part import ModelPart


def part_of(
    module: nn.Module | None, sizes: ParallelSizes, rank: int, world_size: int, experts_apart: bool
) -> ModelPart:
    """Return the part of the model that a rank has.

    Args:
        module: Its module; None where there is none yet.
        sizes: How the world is divided.
        rank: The rank.
        world_size: Number of ranks.
        experts_apart: Whether experts are sharded among other ranks than the rest.

    Raises:
        ConfigurationError: If a module of experts has buffers.
    """
    named = list(module.named_parameters()) if module is not None else []
    experts = {name for name, parameter in named if experts_apart and megatron.is_expert(parameter)}
    modules = frozenset(name.rpartition(".")[0] for name in experts)
    _refuse_buffers(module, modules)
    tensor_rank, in_experts = sizes.tensor_rank(rank), sizes.experts_tensor_rank(rank)
    uncounted = (
        order
        for order, (_, parameter) in enumerate(named)
        if megatron.counts_elsewhere(parameter, in_experts if megatron.is_expert(parameter) else tensor_rank)
    )
    whole = places_in(module) if module is not None else Whole()
    return ModelPart(
        sizes.part_name(rank, world_size),
        frozenset(uncounted),
        frozenset(order for order, (name, _) in enumerate(named) if name in experts),
        sizes.experts_name(rank, world_size),
        modules,
        boxes=whole.boxes,
        objects=whole.objects,
    )


def check_chunks(chunks: Sequence[nn.Module], sizes: ParallelSizes, module: str) -> None:
    """Refuse a model that is not divided as the strategy says, or that does what the strategy does.

    Args:
        chunks: The model's chunks on this rank.
        sizes: How the world is divided.
        module: What the LightningModule is called.

    Raises:
        ConfigurationError: If there is something to refuse.
    """
    wanted = sizes.virtual_pipeline_model_parallel_size or 1
    if not chunks:
        raise ConfigurationError(
            f"{module} has no model of megatron-core. Build it in `configure_model`, and keep it as an attribute."
        )
    if len(chunks) != wanted:
        raise ConfigurationError(
            f"{module} has {len(chunks)} models of megatron-core on this rank, but"
            f" virtual_pipeline_model_parallel_size={sizes.virtual_pipeline_model_parallel_size} needs {wanted}."
        )
    for chunk in chunks:
        if megatron.is_wrapped(chunk):
            raise ConfigurationError(
                f"{type(chunk).__name__} of megatron-core averages gradients, which the strategy does. Keep the model"
                " itself in the module."
            )
        _check_config(megatron.config_of(chunk), sizes)


# What megatron's trainer sets where its own DDP and optimizer are used, and what stands for it here.
_INSTEAD = {
    "no_sync_func": "gradients are reduced after the last micro-batch",
    "grad_sync_func": "gradients are reduced after the last micro-batch",
    "param_sync_func": "parameters are gathered right after the update",
    "finalize_model_grads_func": "`forward_backward` calls megatron-core's `finalize_model_grads`",
    "grad_scale_func": "choose the precision plugin, `MixedPrecision(scaler=...)`",
}


def _check_config(config: Mapping[str, Any], sizes: ParallelSizes) -> None:
    for name, wanted in sizes.for_model.items():
        if name in config and config[name] != wanted:
            raise ConfigurationError(
                f"The model's TransformerConfig has {name}={config[name]!r}, but the strategy has {wanted!r}. Give it"
                " `**self.trainer.strategy.model_parallel_config`."
            )
    for name, instead in _INSTEAD.items():
        if config.get(name) is not None:
            raise ConfigurationError(f"The model's TransformerConfig sets {name}. Leave it out: {instead}.")


def _refuse_buffers(module: nn.Module | None, modules: frozenset[str]) -> None:
    for name, _ in module.named_buffers() if module is not None else ():
        if name.rpartition(".")[0] in modules:
            raise ConfigurationError(
                f"The buffer {name!r} belongs to an expert. All ranks that have the same part of the rest of the model"
                " are given the same buffers, so an expert cannot have one. Keep it in the router, or as a parameter."
            )
