"""Every name of megatron-core that the package uses (tests/megatron/test_contract.py)."""

import copy
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from lightning_replica.errors import ConfigurationError

_KNOWN = "0.16."


def check_installed() -> None:
    """Raise an error if no release of megatron-core is installed that is known here. The supervisor calls it, too.

    Raises:
        ConfigurationError: If it is not.
    """
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        raise ConfigurationError(
            "`MegatronReplicaStrategy` needs megatron-core, which is not installed:"
            " `pip install lightning-replica[megatron]`."
        )
    found = version("megatron-core")
    if not found.startswith(_KNOWN):
        raise ConfigurationError(
            f"megatron-core {found} is installed, but `MegatronReplicaStrategy` uses inner names of {_KNOWN}x. Install"
            " that: `pip install lightning-replica[megatron]`."
        )


def initialize(sizes: Mapping[str, int | None], timeout_minutes: int) -> None:
    """Make megatron-core's process groups, with the sizes that it names. Collective."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        **sizes, distributed_timeout_minutes=timeout_minutes, create_gloo_process_groups=False
    )


def is_initialized() -> bool:
    """Return whether megatron-core's process groups exist in this process."""
    from megatron.core import parallel_state

    return bool(parallel_state.model_parallel_is_initialized())


def sizes() -> dict[str, int | None]:
    """Return the sizes that megatron-core's process groups were made with, by the names that `initialize` takes."""
    from megatron.core import parallel_state as state

    return {
        "tensor_model_parallel_size": state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": state.get_pipeline_model_parallel_world_size(),
        "context_parallel_size": state.get_context_parallel_world_size(),
        "expert_model_parallel_size": state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": state.get_expert_tensor_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": state.get_virtual_pipeline_model_parallel_world_size(),
    }


def seed(value: int) -> None:
    """Seed the random generators of tensor parallel regions."""
    from megatron.core import tensor_parallel

    tensor_parallel.model_parallel_cuda_manual_seed(value)


def generator_states() -> dict[str, Tensor]:
    """Return the state of each generator of tensor parallel regions, by name."""
    from megatron.core.tensor_parallel import random

    return dict(random.get_cuda_rng_tracker().get_states())


def set_generator_states(states: dict[str, Tensor]) -> None:
    """Restore what `generator_states` has returned."""
    from megatron.core.tensor_parallel import random

    random.get_cuda_rng_tracker().set_states(states)


# What a new RerunStateMachine holds of what it carries from step to step. Results of a step under way are left out:
# a step that is done again computes them again.
RERUN_BEGINS: dict[str, Any] = {
    "state": 0,
    "current_iteration": -1,
    "first_iteration_complete": False,
    "rerun_requested": False,
    "checkpoint_requested": False,
    "restart_again_requested": False,
    "continue_requested": False,
    "logged_sdc_enabled": False,
    "large_value_counts": {},
    "max_values": {},
}


def rerun_state() -> dict[str, Any] | None:
    """Return the plain state of megatron-core's RerunStateMachine; None if nobody has made one."""
    from megatron.core import rerun_state_machine

    machine = rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE
    if machine is None:
        return None
    found = {name: copy.copy(getattr(machine, name)) for name in RERUN_BEGINS}
    return {**found, "state": machine.state.value}


def set_rerun_state(state: Mapping[str, Any] | None) -> None:
    """Restore what `rerun_state` has returned; the machine's mode stays as the script has set it."""
    from megatron.core import rerun_state_machine

    if state is None and rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE is None:
        return
    machine = rerun_state_machine.get_rerun_state_machine()
    for name, value in (RERUN_BEGINS if state is None else state).items():
        setattr(machine, name, rerun_state_machine.RerunState(value) if name == "state" else copy.copy(value))


def chunks_of(module: nn.Module) -> list[nn.Module]:
    """Return the outermost modules of megatron-core in ``module``: the model chunks of this rank."""
    from megatron.core.transformer.module import MegatronModule

    if isinstance(module, MegatronModule):
        return [module]
    return [chunk for child in module.children() for chunk in chunks_of(child)]


def config_of(chunk: nn.Module) -> Mapping[str, Any]:
    """Return the configuration of a model chunk, by the names of ``TransformerConfig``."""
    found: Mapping[str, Any] = vars(chunk.config)
    return found


def is_wrapped(chunk: nn.Module) -> bool:
    """Return whether a chunk is a wrapper of megatron-core that averages gradients by itself."""
    from megatron.core.distributed.data_parallel_base import _BaseDataParallel

    return isinstance(chunk, _BaseDataParallel)


@contextmanager
def scaled_losses(chunks: Sequence[nn.Module], scale: Callable[[Tensor], Tensor] | None) -> Iterator[None]:
    """Let schedules multiply losses before the backward pass, with ``scale``; None to leave them as they are."""
    configs: list[Any] = [chunk.config for chunk in chunks]
    for config in configs:
        config.grad_scale_func = scale
    try:
        yield
    finally:
        for config in configs:
            config.grad_scale_func = None


def run_schedule(
    forward_step: Callable[..., Any],
    batches: Sequence[Iterator[Any]],
    chunks: Sequence[nn.Module],
    micro_batches: int,
    seq_length: int,
    micro_batch_size: int,
    forward_only: bool,
) -> None:
    """Run the forward (and backward) passes of all micro-batches under megatron-core's own schedule."""
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    several = len(chunks) > 1
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=list(batches) if several else batches[0],
        model=list(chunks),
        num_microbatches=micro_batches,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        forward_only=forward_only,
    )


def finalize(chunks: Iterable[nn.Module]) -> None:
    """Complete the gradients of parameters of which several model parallel ranks have copies. Collective."""
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads

    finalize_model_grads([_AsUnderDDP(chunk) for chunk in chunks])


def last_stage() -> int:
    """Return the rank that has the last stage, in this rank's pipeline."""
    from megatron.core import parallel_state

    return int(parallel_state.get_pipeline_model_parallel_last_rank())


def pipeline_group() -> dist.ProcessGroup:
    """Return the group of the ranks of this rank's pipeline."""
    from megatron.core import parallel_state

    group: dist.ProcessGroup = parallel_state.get_pipeline_model_parallel_group()
    return group


def is_expert(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is an expert's, so that other ranks have other experts in its place."""
    return not getattr(parameter, "allreduce", True)


def counts_elsewhere(parameter: nn.Parameter, tensor_rank: int) -> bool:
    """Return whether the norm of gradients counts a parameter on another rank, which has a copy of it.

    That is so for tied embeddings of the last stage, and for what tensor parallel ranks have in common.
    """
    shared = getattr(parameter, "shared", False)
    return bool(shared or (tensor_rank > 0 and not getattr(parameter, "tensor_model_parallel", False)))


class WholeTensor(NamedTuple):
    """A part of a tensor of the whole model, as megatron-core's `ShardedTensor` describes it.

    Attributes:
        key: The name of the tensor in the whole model.
        data: The part, in the memory of one of the module's tensors.
        shape: The shape of the tensor in the whole model.
        offset: The first index of the part there.
        prepended: How many dimensions the tensor has there before those of ``data``.
        padded: Whether ``shape`` depends on how the model is divided.
    """

    key: str
    data: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    prepended: int
    padded: bool


def whole_tensors(module: nn.Module) -> tuple[list[WholeTensor], list[str]]:
    """Return the parts of the whole model's tensors that a module has, and the names of what is no tensor.

    A model has its own names, as in megatron-core's checkpoints. A layer outside of one has those of ``module``.
    """
    from megatron.core import parallel_state
    from megatron.core.transformer.module import MegatronModule

    tensors: list[WholeTensor] = []
    objects: list[str] = []
    for name, part in _described_in(module, ""):
        if isinstance(part, MegatronModule):
            _collect(part.sharded_state_dict(), tensors, objects)
        else:
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            _collect(part.sharded_state_dict(prefix=name, metadata={"dp_cp_group": group}), tensors, objects)
    return tensors, objects


def _described_in(module: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Return the outermost modules that have a ``sharded_state_dict``, with what names of their tensors begin with."""
    if hasattr(module, "sharded_state_dict"):
        yield prefix, module
        return
    for name, child in module.named_children():
        yield from _described_in(child, f"{prefix}{name}.")


def _collect(entry: Any, tensors: list[WholeTensor], objects: list[str]) -> None:
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory

    if isinstance(entry, ShardedTensor):
        tensors.append(
            WholeTensor(
                entry.key,
                entry.data,
                tuple(entry.global_shape),
                tuple(entry.global_offset),
                entry.prepend_axis_num,
                entry.allow_shape_mismatch,
            )
        )
    elif isinstance(entry, ShardedTensorFactory):
        _collect(entry.build(), tensors, objects)
    elif isinstance(entry, ShardedObject):
        objects.append(entry.unique_key)
    elif isinstance(entry, Mapping):
        for each in entry.values():
            _collect(each, tensors, objects)
    elif isinstance(entry, list):
        for each in entry:
            _collect(each, tensors, objects)


class _AsUnderDDP:
    """A chunk as `finalize_model_grads` expects it. The sum over data parallel ranks comes later, in the reduction."""

    ddp_config = SimpleNamespace(use_megatron_fsdp=False)

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Do nothing."""
