"""`MegatronReplicaStrategy`: `ReplicaZeroStrategy` for models that megatron-core divides among ranks."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_replica._compat import megatron
from lightning_replica._compat.lightning_names import Accelerator, CheckpointIO, ClusterEnvironment, Precision, pl
from lightning_replica.checkpoint.location import Location
from lightning_replica.checkpoint.which_storage import storage_of
from lightning_replica.core import checks
from lightning_replica.core.digests import GuardMode
from lightning_replica.core.grids import Grids
from lightning_replica.core.options import OnInexact
from lightning_replica.devices.interface import Device
from lightning_replica.errors import ConfigurationError, ReplicaError
from lightning_replica.launch.choice import is_rank
from lightning_replica.megatron.device import with_megatron
from lightning_replica.megatron.division import check_chunks, part_of
from lightning_replica.megatron.schedule import ForwardStep, Losses, size_of, split
from lightning_replica.megatron.sizes import ParallelSizes
from lightning_replica.sharding.engine import ReduceDtype
from lightning_replica.trainer.model_part import ModelPart
from lightning_replica.trainer.saving.checkpoints import weights_of_part
from lightning_replica.trainer.saving.which_checkpoint import Resume
from lightning_replica.trainer.strategy import ReplicaZeroStrategy

_DEFAULT_SEED = 1234  # as megatron's `--seed`


class MegatronReplicaStrategy(ReplicaZeroStrategy):
    """Tensor, pipeline, context and expert parallelism by megatron-core, with replicated shards.

    A LightningModule builds its megatron-core model in ``configure_model``. In ``training_step`` it returns
    ``self.trainer.strategy.forward_backward(self.forward_step, batch)``, which runs megatron-core's schedule.
    Checkpoints are sharded: directories that all ranks write in parallel.

    Args:
        tensor_model_parallel_size: Ranks that share every layer.
        pipeline_model_parallel_size: Stages that the layers are divided into.
        context_parallel_size: Ranks that share every sequence.
        expert_model_parallel_size: Ranks that divide the experts of a layer among themselves.
        expert_tensor_parallel_size: Ranks that share every expert; None for ``tensor_model_parallel_size``.
        log_num_zeros_in_grad: Whether zeros in the gradient are counted, for ``num_zeros_in_grad``.
        micro_batch_size: Samples in a micro-batch. A batch of the DataLoader is what one data parallel rank trains on
            in a step. None: a batch is one micro-batch.
        sequence_parallel: Whether tensor ranks divide the sequence among themselves between tensor parallel regions.
        virtual_pipeline_model_parallel_size: Chunks of the model that each stage has; None for one. The module keeps
            them in a ``ModuleList``.
        replicas: As in `ReplicaZeroStrategy`. It must divide the number of ranks that have the same parameters, and of
            those that have the same experts.
        whole_gradients: As in `ReplicaZeroStrategy`.
        shared_memory: As in `ReplicaZeroStrategy`.
        guard: As in `ReplicaZeroStrategy`.
        bucket_bytes: As in `ReplicaZeroStrategy`.
        reduce_dtype: As in `ReplicaZeroStrategy`. With "float32", gradients of 16-bit parameters are added up in 32
            bits over micro-batches and ranks, as by megatron's ``accumulate_allreduce_grads_in_fp32``.
        recovery: As in `ReplicaZeroStrategy`.
        max_restarts: As in `ReplicaZeroStrategy`.
        standby: As in `ReplicaZeroStrategy`.
        max_tries: As in `ReplicaZeroStrategy`.
        on_inexact: As in `ReplicaZeroStrategy`.
        timeout_s: As in `ReplicaZeroStrategy`.
        rendezvous_timeout_s: As in `ReplicaZeroStrategy`.
        hang_min_s: As in `ReplicaZeroStrategy`.
        hang_max_s: As in `ReplicaZeroStrategy`.
        resume: As in `ReplicaZeroStrategy`.
        accelerator: As in every Lightning strategy.
        parallel_devices: As in every Lightning strategy.
        cluster_environment: As in every Lightning strategy.
        checkpoint_io: As in every Lightning strategy.
        precision_plugin: As in every Lightning strategy.

    Raises:
        ConfigurationError: If a value makes no sense, or megatron-core is not installed.
    """

    strategy_name = "replica_zero_megatron"

    def __init__(
        self,
        tensor_model_parallel_size: int = 1,
        pipeline_model_parallel_size: int = 1,
        context_parallel_size: int = 1,
        expert_model_parallel_size: int = 1,
        expert_tensor_parallel_size: int | None = None,
        sequence_parallel: bool = False,
        virtual_pipeline_model_parallel_size: int | None = None,
        log_num_zeros_in_grad: bool = False,
        micro_batch_size: int | None = None,
        replicas: int = 2,
        whole_gradients: bool | Literal["auto"] = "auto",
        shared_memory: bool = True,
        guard: GuardMode = "sampled",
        bucket_bytes: int | None = None,
        reduce_dtype: ReduceDtype | None = "float32",
        recovery: bool = True,
        max_restarts: int = 3,
        standby: int = 0,
        max_tries: int = 3,
        on_inexact: OnInexact = "report",
        timeout_s: float = 1800.0,
        rendezvous_timeout_s: float = 600.0,
        hang_min_s: float = 60.0,
        hang_max_s: float = 1800.0,
        resume: Resume = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            replicas=replicas,
            whole_gradients=whole_gradients,
            state_dict_type="sharded",  # no rank has all of the model
            shared_memory=shared_memory,
            guard=guard,
            bucket_bytes=bucket_bytes,
            reduce_dtype=reduce_dtype,
            recovery=recovery,
            max_restarts=max_restarts,
            standby=standby,
            max_tries=max_tries,
            on_inexact=on_inexact,
            timeout_s=timeout_s,
            rendezvous_timeout_s=rendezvous_timeout_s,
            hang_min_s=hang_min_s,
            hang_max_s=hang_max_s,
            resume=resume,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        if micro_batch_size is not None:
            checks.whole(1, micro_batch_size=micro_batch_size)
        megatron.check_installed()
        self._sizes = ParallelSizes(
            tensor_model_parallel_size,
            pipeline_model_parallel_size,
            context_parallel_size,
            expert_model_parallel_size,
            expert_tensor_parallel_size,
            virtual_pipeline_model_parallel_size,
            sequence_parallel,
        )
        self._micro_batch_size = micro_batch_size
        self._counts_zeros = log_num_zeros_in_grad
        self._begins_window = True  # whether the next batch is the first whose gradients go into a step
        self._schedule_has_run = False  # whether the gradients of this batch exist already
        self._checked: tuple[int, ...] = ()  # ids of the chunks of the model that `check_chunks` has seen

    # Ranks

    @property
    def grids(self) -> Grids:
        """Which rank owns which shard: one grid for each tensor rank of each stage."""
        return self._sizes.grids(self.world_size, self._replicas, self.num_nodes)

    @property
    def model_parallel_config(self) -> dict[str, Any]:
        """The sizes by the names of ``TransformerConfig``, to be given to it with the rest of the configuration.

        ``TransformerConfig(num_layers=12, ..., **self.trainer.strategy.model_parallel_config)``
        """
        return self._sizes.for_model

    @property
    def num_zeros_in_grad(self) -> float | None:
        """The number of elements of the whole model's averaged gradient that were zero in the newest step.

        None before the first step of a fit, and without ``log_num_zeros_in_grad``.
        """
        return None if self._training is None else self.precision_plugin.gradient[1]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of the sampler: ranks that hold parts of one copy of the model read the same data."""
        return {
            "num_replicas": self._sizes.data_parallel_size(self.world_size),
            "rank": self._sizes.data_parallel_rank(self.global_rank, self.world_size),
        }

    # Setting up

    def setup_environment(self) -> None:
        """Join the world, and make megatron-core's process groups.

        Raises:
            ConfigurationError: If they exist already, with other sizes.
        """
        super().setup_environment()
        if not is_rank(self.cluster_environment):
            return
        if megatron.is_initialized():
            self._sizes.check_groups(megatron.sizes())
        else:
            megatron.initialize(self._sizes.for_groups, max(1, int(self._timeout_s / 60)))
            megatron.seed(int(os.environ.get("PL_GLOBAL_SEED", _DEFAULT_SEED)))

    def setup(self, trainer: pl.Trainer) -> None:
        """Set up the model and, for a fit, the optimizers, whose ``zero_grad`` keeps what a schedule has computed."""
        super().setup(trainer)
        for optimizer in self.optimizers:  # the engine has replaced the method, and puts the user's back at the end
            optimizer.zero_grad = self._unless_run(optimizer.zero_grad)  # type: ignore[method-assign]

    def _unless_run(self, zero_grad: Callable[..., None]) -> Callable[..., None]:
        """Return ``zero_grad`` without an effect between a schedule and the end of its batch.

        Lightning calls it between ``training_step`` and ``backward``, when the schedule has run backward already.
        """

        def unless_run(set_to_none: bool = True) -> None:
            if not self._schedule_has_run:
                zero_grad(set_to_none)

        return unless_run

    def part(self) -> ModelPart:
        """Return which part of the model this rank has."""
        module = self.lightning_module
        part = part_of(module, self._sizes, self.global_rank, self.world_size, bool(self.grids.experts))
        return replace(part, counts_zeros=self._counts_zeros)

    def _of_own_part(self, checkpoint: dict[str, Any], path: Location) -> dict[str, Any]:
        module = self.lightning_module
        if self._is_fitting or module is None or not storage_of(path).may_be_sharded():
            return checkpoint
        return {**checkpoint, "state_dict": weights_of_part(path, self.part(), module, checkpoint["state_dict"])}

    def _device(self) -> Device:
        return with_megatron(super()._device())

    # A step

    def forward_backward(
        self, forward_step: ForwardStep, batch: Any, forward_only: bool = False, seq_length: int | None = None
    ) -> Tensor:
        """Run forward and backward passes of all micro-batches under megatron-core's schedule.

        Args:
            forward_step: Called with an iterator over micro-batches and the model (a chunk of it), as by megatron-core.
                It returns the output, and a function that turns the last stage's output into ``(loss, logged)``.
            batch: What this data parallel rank trains on: tensors in any nesting, with samples in the first dimension.
            forward_only: Whether to run no backward pass, as in validation.
            seq_length: Tokens of a sample that stages send each other; None for the second dimension of the batch's
                first tensor that has two.

        Returns:
            The mean loss over micro-batches, of shape (), the same on all stages, without gradient.

        Raises:
            ConfigurationError: If the batch cannot be cut into micro-batches, or the module has no model of
                megatron-core.
        """
        chunks = self._chunks()
        micro_batches = split(batch, self._micro_batch_size, not forward_only, self._sizes.interleaved_stages)
        samples, tokens = size_of(micro_batches[0])
        tokens = tokens if seq_length is None else seq_length
        losses = Losses(forward_step)
        if not forward_only:
            self._before_schedule()
        iterators = [iter(micro_batches) for _ in chunks]
        with megatron.scaled_losses(chunks, self._scale_of_losses()):
            megatron.run_schedule(losses, iterators, chunks, len(micro_batches), tokens, samples, forward_only)
        self._schedule_has_run = not forward_only
        return self._from_last_stage(losses.mean(self.root_device))

    def _scale_of_losses(self) -> Callable[[Tensor], Tensor] | None:
        """Return what multiplies losses before the backward pass: the loss scale, and 1 / ``accumulate_grad_batches``.

        Lightning divides only what ``training_step`` returns, which has no gradient here.
        """
        scaler, module = self.precision_plugin.enabled_scaler(), self.lightning_module
        batches = 1 if module is None else module.trainer.accumulate_grad_batches
        if batches == 1:
            return None if scaler is None else scaler.scale
        return lambda loss: (loss if scaler is None else scaler.scale(loss)) / batches

    def _chunks(self) -> list[nn.Module]:
        """Return the model's chunks on this rank, once they are known to fit to the strategy."""
        module = self.lightning_module
        if module is None:
            raise ReplicaError("There is no LightningModule: `forward_backward` is called in its steps.")
        chunks = megatron.chunks_of(module)
        if self._checked != tuple(map(id, chunks)):
            check_chunks(chunks, self._sizes, type(module).__name__)
            self._checked = tuple(map(id, chunks))
        return chunks

    def _before_schedule(self) -> None:
        if self._begins_window:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        self._begins_window = False
        self.training.before_backward(accumulating=True)

    def _from_last_stage(self, loss: Tensor) -> Tensor:
        if self._sizes.pipeline_model_parallel_size > 1:
            work = dist.broadcast(loss, megatron.last_stage(), group=megatron.pipeline_group(), async_op=True)
            self.session.world.wait(work, loss)
        return loss

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Complete what the schedule has computed. The schedule has run the backward passes.

        Hooks around them are called here: those before as soon as a loss exists, those after with reduced gradients.

        Raises:
            ConfigurationError: If the training step has not run a schedule.
        """
        if not self._schedule_has_run:
            raise ConfigurationError(
                "The training step has run no schedule: return"
                " `self.trainer.strategy.forward_backward(self.forward_step, batch)` in `training_step`."
            )
        self._schedule_has_run = False
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def _run_backward(self, backward: Callable[[], None], loss: Tensor) -> None:
        """Finalize and reduce what the schedule has computed, in place of ``backward``."""
        if not self._accumulating:  # it adds up over ranks, so once, when all batches of the step are there
            megatron.finalize(self._chunks())
        super()._run_backward(lambda: None, loss)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Make one step. See `ReplicaZeroStrategy.optimizer_step`."""
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._begins_window = True
        return result
