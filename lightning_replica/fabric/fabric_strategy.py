"""`FabricStrategy`: the strategy that Lightning Fabric calls."""

import atexit
import gc
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_replica._compat.lightning_names import (
    _StrategyRegistry,
    fabric_accelerators,
    fabric_plugins,
    fabric_strategies,
)
from lightning_replica._compat.packages import describe
from lightning_replica.checkpoint.barrier import Barrier
from lightning_replica.core import checks
from lightning_replica.core.grid import Grid
from lightning_replica.core.messages import say
from lightning_replica.devices import gloo
from lightning_replica.devices.host import HOST
from lightning_replica.errors import ConfigurationError
from lightning_replica.fabric import checkpoint_file
from lightning_replica.fabric.census import answering, register_process
from lightning_replica.launch.environment import RankEnvironment
from lightning_replica.launch.external import store_of_attempt
from lightning_replica.sharding.engine import Partition
from lightning_replica.sharding.replica_optimizer import ReplicaOptimizer

_START_METHODS = ("popen", "spawn", "fork", "forkserver")


class FabricStrategy(fabric_strategies.DDPStrategy):
    """DDP whose optimizers shard their state, every shard held by several ranks, in a loop of the user's.

    Gradients are averaged by DDP and whole on every rank, so clipping, loss scaling and accumulation are those of DDP.
    A lost rank ends the run, with an error that says what a loop must do to be recoverable.

    Args:
        replicas: Copies of the optimizer state, R. It must divide the number of ranks. 1 shards without redundancy.
        partition: "element" cuts parameters anywhere, for optimizers that update every element on its own. "parameter"
            keeps parameters whole, for all other optimizers (Muon, Adafactor ...).
        shared_memory: Whether ranks on one machine's CPU read each other's memory where they can, instead of sending.
        find_unused_parameters: As in torch's DistributedDataParallel.
        static_graph: As in torch's DistributedDataParallel.
        gradient_as_bucket_view: As in torch's DistributedDataParallel; saves a copy of the gradients.
        broadcast_buffers: As in torch's DistributedDataParallel.
        timeout_s: Time after which a collective fails on its own, in seconds.
        process_group_backend: The backend for torch.distributed. None: gloo for the host's tensors, which it must have,
            and torch's choice for the device's.
        start_method: "popen" runs the script again for every rank. The others make processes that run the function of
            ``fabric.launch``. Where another launcher has started the ranks, this has no effect.
        accelerator: As in every Fabric strategy.
        parallel_devices: As in every Fabric strategy.
        cluster_environment: As in every Fabric strategy.
        checkpoint_io: As in every Fabric strategy.
        precision: As in every Fabric strategy.

    Raises:
        ConfigurationError: If a value makes no sense. Some values are checked once the number of ranks is known.
    """

    strategy_name = "replica_zero"

    def __init__(
        self,
        replicas: int = 2,
        partition: Partition = "element",
        shared_memory: bool = True,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = False,
        broadcast_buffers: bool = True,
        timeout_s: float = 1800.0,
        process_group_backend: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        accelerator: fabric_accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: fabric_plugins.ClusterEnvironment | None = None,
        checkpoint_io: fabric_plugins.CheckpointIO | None = None,
        precision: fabric_plugins.Precision | None = None,
    ) -> None:
        checks.whole(1, replicas=replicas)
        checks.seconds(timeout_s=timeout_s)
        checks.choice("partition", partition, ("element", "parameter"))
        checks.choice("shared_memory", shared_memory, (True, False))
        checks.choice("start_method", start_method, _START_METHODS)
        super().__init__(
            accelerator,
            parallel_devices,
            cluster_environment,
            checkpoint_io,
            precision,
            process_group_backend,
            timedelta(seconds=timeout_s),
            start_method,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            gradient_as_bucket_view=gradient_as_bucket_view,
            **{} if broadcast_buffers else {"broadcast_buffers": False},  # torch 2.13 warns of its name
        )
        self._replicas, self._partition, self._timeout_s = replicas, partition, timeout_s
        self._shared_memory = shared_memory

    def __repr__(self) -> str:
        """Say which package of Lightning this object is for: the other one shows it in its error."""
        return describe(self)

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Register this class for ``Fabric(strategy="replica_zero")``."""
        description = (cls.__doc__ or "").partition("\n")[0]
        strategy_registry.register(cls.strategy_name, cls, description=description, override=True)

    # Ranks

    def _configure_launcher(self) -> None:
        if RankEnvironment.current() is not None:
            raise ConfigurationError(
                "`lightning-replica run` replaces single ranks, and a loop under Fabric cannot take one in. Start the"
                " script with `torchrun --max-restarts=3`, which starts all ranks again, or use `lightning.Trainer`."
            )
        size = self.num_nodes * self.num_processes
        if size == 1:
            say("one rank has no peers: nothing is sharded. Set `Fabric(devices=2)` or more.")
        else:
            Grid.of(size, self._replicas)  # raises in the first process, before any rank waits for another
        super()._configure_launcher()

    def setup_environment(self) -> None:
        """Set up this process, and join the process group."""
        super().setup_environment()
        register_process()
        atexit.register(_leave)

    def _setup_distributed(self) -> None:
        cluster, timeout = self.cluster_environment, timedelta(seconds=self._timeout_s)
        store = None if cluster is None or dist.is_initialized() else store_of_attempt(cluster)
        if store is not None:
            self._set_world_ranks()
            store.set_timeout(timeout)
            device = None if self.root_device == HOST else self.root_device
            backend = self._get_process_group_backend()
            dist.init_process_group(
                backend,
                store=store,
                rank=self.global_rank,
                world_size=self.world_size,
                timeout=timeout,
                device_id=device,
            )
        super()._setup_distributed()  # opens the group if it is not open yet

    def _get_process_group_backend(self) -> str:
        return self._process_group_backend or gloo.backend_beside(self.root_device)

    # Models and optimizers

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Wrap a model in DDP, which averages its gradients. Collective."""
        with answering("Setting up a model"):
            wrapped = super().setup_module(module)
        wrapped.__class__ = _Averaged  # it has no state of its own; DDP is made as Fabric makes it
        return wrapped

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Shard the state of an optimizer. Collective. The model must be set up before, or together with it.

        The optimizer stays the object that updates: its hooks are called, and schedulers that were made for it before
        have an effect.

        Raises:
            ConfigurationError: If it cannot be sharded, or its parameters are not on this rank's device.
        """
        if isinstance(optimizer, ReplicaOptimizer):
            return optimizer
        elsewhere = {p.device for group in optimizer.param_groups for p in group["params"]} - {self.root_device}
        if elsewhere:
            raise ConfigurationError(
                f"Parameters of the optimizer are on {', '.join(map(str, elsewhere))}, but this rank trains on"
                f" {self.root_device}. Set up their model first: `fabric.setup(model, optimizer)`, or"
                " `fabric.setup_module(model)` before `fabric.setup_optimizers(optimizer)`."
            )
        with answering("Setting up an optimizer"):
            return ReplicaOptimizer.of(
                optimizer,
                replicas=self._replicas if self.world_size > 1 else 1,
                partition=self._partition,
                shared_memory=self._shared_memory,
                timeout_s=self._timeout_s,
            )

    # A step. What fails in a collective is answered.

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass, in which DDP averages gradients. Collective."""
        with answering("The reduction of gradients"):
            super().backward(tensor, module, *args, **kwargs)

    # Fabric refuses a plain `loss.backward()` under a strategy that has a backward of its own. This one adds nothing.
    backward.__wrapped__ = fabric_strategies.Strategy.backward  # type: ignore[attr-defined]

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Update the own shard, and gather all parameters. Collective."""
        with answering("The optimizer's step"):
            return super().optimizer_step(optimizer, **kwargs)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the ranks. Collective."""
        with answering("`all_reduce`"):
            return super().all_reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather a tensor from all ranks. Collective."""
        with answering("`all_gather`"):
            return super().all_gather(tensor, group, sync_grads)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks. Collective."""
        with answering("`barrier`"):
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Send an object to all ranks. Collective."""
        with answering("`broadcast`"):
            return super().broadcast(obj, src)

    # Checkpoints

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the state of a model; on rank 0, which writes it, without the gaps of the flat buffers."""
        state = super().get_module_state_dict(module)
        if not self.is_global_zero:
            return state
        return {key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in state.items()}

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole state of an optimizer, as without sharding, on rank 0; nothing on others. Collective."""
        with answering("Collecting the optimizer's state"):
            return super().get_optimizer_state(optimizer)

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write one file that every strategy loads, from rank 0, atomically. Collective.

        Raises:
            CheckpointError: On every rank, if rank 0 could not write it. The file that was there before stays.
        """
        with answering("Saving"):
            content = self._convert_stateful_objects_in_state(state, filter or {})
            Barrier(None).run(partial(self._write, path, content, storage_options))

    def _write(self, path: Any, content: dict[str, Any], storage_options: Any | None) -> None:
        if not self.is_global_zero:
            return
        if storage_options is None and type(self.checkpoint_io) is fabric_plugins.TorchCheckpointIO:
            checkpoint_file.write(path, content)
        else:
            self.checkpoint_io.save_checkpoint(content, path, storage_options)

    def load_checkpoint(
        self, path: Any, state: Any | None = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a file that any strategy has written.

        Raises:
            CheckpointError: If it is damaged, or a directory.
        """
        # Another plugin checks what it has written by itself.
        if not isinstance(self.checkpoint_io, fabric_plugins.TorchCheckpointIO):
            return super().load_checkpoint(path, state, strict, weights_only)
        with checkpoint_file.checked(path):
            if not isinstance(state, dict):
                return super().load_checkpoint(path, state, strict, weights_only)
            # An optimizer takes the values of its shard from the parameters, so models come first.
            first = {key: value for key, value in state.items() if isinstance(value, nn.Module)}
            ordered = {**first, **{key: value for key, value in state.items() if key not in first}}
            rest = super().load_checkpoint(path, ordered, strict, weights_only)
            state.update(ordered)
            return rest


def _leave() -> None:
    """Destroy all process groups, which ends their threads.

    A thread of gloo's that drops the tensors of the last collective needs the interpreter. If the interpreter has begun
    to end by then, the process aborts (three of twenty runs of a short loop under ``ddp_spawn``).
    """
    gc.collect()  # models in reference cycles hold groups
    if dist.is_initialized():
        dist.destroy_process_group()


class _Averaged(DistributedDataParallel):
    """DDP that says what to do if a rank is lost when buffers are sent, before forward."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with answering("Forward"):
            forward: Callable[..., Any] = super().forward
            return forward(*inputs, **kwargs)
