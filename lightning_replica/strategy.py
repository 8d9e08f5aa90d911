"""`ReplicaZeroStrategy`: what Lightning sees."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator
from lightning.pytorch.plugins import CheckpointIO, ClusterEnvironment, Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_replica import fit_loop, objects
from lightning_replica._compat.lightning import _all_gather_ddp_if_available, _StrategyRegistry, quiet_sigterm
from lightning_replica.data.position import ExactLoader
from lightning_replica.devices import cpu
from lightning_replica.errors import CollectiveError, ConfigurationError, Interrupted, RecoveryError, ReplicaError
from lightning_replica.grid import Grid
from lightning_replica.host import LightningHost
from lightning_replica.launch.environment import RankEnvironment
from lightning_replica.launch.launcher import SupervisorLauncher
from lightning_replica.messages import say
from lightning_replica.points import reach
from lightning_replica.precision import ReplicaPrecision
from lightning_replica.recovery.recovery import Limits, describe
from lightning_replica.session import Session, join
from lightning_replica.sharding.optimizer import check_element_wise, trained_parameters
from lightning_replica.sharding.state import Clip, ShardedState
from lightning_replica.snapshot import Snapshot

log = logging.getLogger(__name__)


class ReplicaZeroStrategy(ParallelStrategy):
    """Data parallelism with sharded optimizer state, every shard held by several ranks; a lost rank is replaced.

    Args:
        replicas: Copies of the optimizer state, R; divides the number of ranks. ``replicas - 1`` holders of a shard
            may be lost at a time. 1 shards without redundancy.
        bucket_bytes: Size at which a gradient bucket is closed and sent.
        max_restarts: Processes that may be replaced in one run.
        max_tries: Recoveries at one step before the run ends.
        timeout_s: After which a collective fails on its own.
        rendezvous_timeout_s: How long ranks wait for a replacement to come.
        accelerator: As in every Lightning strategy.
        parallel_devices: As in every Lightning strategy.
        cluster_environment: As in every Lightning strategy.
        checkpoint_io: As in every Lightning strategy.
        precision_plugin: As in every Lightning strategy.

    Raises:
        ConfigurationError: If a value makes no sense, here or as soon as the number of ranks is known.
    """

    strategy_name = "replica_zero"
    is_distributed = True  # without it Lightning adds no distributed sampler

    def __init__(
        self,
        replicas: int = 2,
        bucket_bytes: int = 16 * 2**20,
        max_restarts: int = 3,
        max_tries: int = 3,
        timeout_s: float = 1800.0,
        rendezvous_timeout_s: float = 600.0,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        _check_numbers(replicas=replicas, bucket_bytes=bucket_bytes, timeout_s=timeout_s, max_tries=max_tries)
        if not isinstance(max_restarts, int) or max_restarts < 0:
            raise ConfigurationError(f"{max_restarts=} must be a whole number, 0 or more.")
        self._replicas, self._bucket_bytes, self._max_restarts = replicas, bucket_bytes, max_restarts
        self._timeout_s, self._limits = timeout_s, Limits(max_tries, rendezvous_timeout_s)
        self._session: Session | None = None
        self._state: ShardedState | None = None
        self._host: LightningHost | None = None
        self._accumulating = self._step_done = False

    # Who we are

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Makes ``Trainer(strategy="replica_zero")`` find this class."""
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(cls.strategy_name, cls, description=(cls.__doc__ or "").splitlines()[0])

    @property
    def grid(self) -> Grid:
        """The table of ranks."""
        return Grid(self.num_processes, self._replicas)

    @property
    def num_nodes(self) -> int:
        """One: ranks on several nodes are not started yet."""
        return 1

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        if num_nodes != 1:
            raise ConfigurationError(f"{num_nodes=}: `replica_zero` runs on one node so far. Set `num_nodes=1`.")

    @property
    def num_processes(self) -> int:
        """Ranks on this node."""
        return len(self.parallel_devices or ())

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        return (self.parallel_devices or [torch.device("cpu")])[self.local_rank]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Every rank reads its own part of the data."""
        return {"num_replicas": self.num_processes, "rank": self.global_rank}

    @property
    def precision_plugin(self) -> Precision:
        """32-bit, with clipping in the commit."""
        return self._precision_plugin or ReplicaPrecision()

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        if precision_plugin is not None and type(precision_plugin) not in (Precision, ReplicaPrecision):
            raise ConfigurationError(
                f"precision_plugin={type(precision_plugin).__name__} (precision={precision_plugin.precision!r}):"
                " `replica_zero` trains in 32 bits so far. Set `Trainer(precision='32-true')`."
            )
        self._precision_plugin = (
            precision_plugin if isinstance(precision_plugin, ReplicaPrecision) else ReplicaPrecision()
        )

    # Setting up

    def _configure_launcher(self) -> None:
        grid = self.grid  # raises, in the first process, before anyone waits for anyone
        if not isinstance(self.accelerator, CPUAccelerator):
            raise ConfigurationError(
                f"accelerator={type(self.accelerator).__name__}: `replica_zero` runs on CPU so far."
                " Set `Trainer(accelerator='cpu')`."
            )
        self._launcher = SupervisorLauncher(grid.world_size, self._max_restarts)

    def set_world_ranks(self) -> None:
        """Tells the cluster environment who we are."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.local_rank)
            self.cluster_environment.set_world_size(self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def setup_environment(self) -> None:
        """Joins the world."""
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        environment = RankEnvironment.current()
        if environment is not None:
            self._session = join(self.grid, self.global_rank, environment, "gloo", self._timeout_s, self._limits)

    def setup(self, trainer: pl.Trainer) -> None:
        """Lays the parameters out and re-points the optimizer."""
        if self.accelerator is not None:
            self.accelerator.setup(trainer)
        self.model_to_device()
        if not self.session.newborn:
            self._sync_module()
        if trainer.state.fn == TrainerFn.FITTING:
            fit_loop.adopt(trainer)
            quiet_sigterm(trainer)
            self.setup_optimizers(trainer)
            self._shard(trainer)
        self.setup_precision_plugin()

    def _shard(self, trainer: pl.Trainer) -> None:
        module = self.lightning_module
        if module is None or not module.automatic_optimization:
            raise ConfigurationError(
                "automatic_optimization=False: `replica_zero` supports automatic optimization so far."
            )
        if len(self.optimizers) != 1:
            raise ConfigurationError(
                f"`configure_optimizers` returned {len(self.optimizers)} optimizers; `replica_zero` takes one so far."
            )
        optimizer = self.optimizers[0]
        check_element_wise(optimizer)
        trained = {id(p) for p in trained_parameters(optimizer)}
        parameters = [p for p in module.parameters() if id(p) in trained]
        self._state = ShardedState(self.grid, self.global_rank, parameters, optimizer, self._bucket_bytes)
        self.session.attach(self._state)
        self._host = LightningHost(trainer, parameters)
        plugin = self.precision_plugin
        if isinstance(plugin, ReplicaPrecision):
            plugin.attach(self._step)

    def _sync_module(self) -> None:
        """Every rank begins with the parameters and buffers of rank 0, as under DDP."""
        if self.model is None:
            return
        with torch.no_grad():
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                self.session.wait(dist.broadcast(tensor.data, 0, group=self.session.groups.world, async_op=True))

    def model_to_device(self) -> None:
        """Moves the model."""
        if self.model is not None:
            self.model.to(self.root_device)

    def process_dataloader(self, dataloader: object) -> object:
        """Makes the training data exact: it can be put back to any batch."""
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        if trainer is None or trainer.state.stage != RunningStage.TRAINING or isinstance(dataloader, ExactLoader):
            return dataloader
        return ExactLoader(dataloader, cpu.rng_state, cpu.set_rng_state)

    @property
    def session(self) -> Session:
        """This process's part in the world."""
        if self._session is None:
            raise ReplicaError("The strategy is not set up: call `trainer.fit` (or validate, test, predict) first.")
        return self._session

    @property
    def state(self) -> ShardedState:
        """The sharded state; only while fitting."""
        if self._state is None:
            raise ReplicaError("There is no sharded state: it exists only while fitting.")
        return self._state

    @property
    def host(self) -> LightningHost:
        """The host state; only while fitting."""
        if self._host is None:
            raise ReplicaError("There is no host state: it exists only while fitting.")
        return self._host

    # A step

    def begin_batch(self, window_begins: bool) -> None:
        """Called by the epoch loop before every batch; takes the first snapshot where a window begins."""
        self.session.check()
        if window_begins:
            taken = self.host.begin_window(self.state.step)
            self.session.mirrors.begin("batch", taken.step, taken.private_bytes())

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Gradients only accumulate inside."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Makes ready for reductions that overlap backward."""
        self.state.before_backward(reduce=not self._accumulating)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """One step; in a tail that is done again, only the result of its closure."""
        return closure() if self._step_done else super().optimizer_step(optimizer, closure, model, **kwargs)

    @contextmanager
    def step_is_done(self) -> Iterator[None]:
        """Lets `optimizer_step` pass: the update has been made, only hooks are called again."""
        self._step_done = True
        try:
            yield
        finally:
            self._step_done = False

    def _step(self, clip: Clip) -> None:
        """After backward and its hooks: reduce, commit, update, gather (docs/life_of_a_step.md)."""
        state, session = self.state, self.session
        state.clip = clip
        state.reduce()
        taken = self.host.enter_commit(state.step + 1)
        session.mirrors.begin("tail", taken.step, taken.private_bytes())
        session.mirrors.settle()
        reach("before_commit")
        commit = state.commit()
        session.recovery.committed(state.step + 1, commit.vector)
        reach("after_commit")
        state.update()
        state.gather()
        reach("batch_end")

    # Recovery, called by the fit loop

    def begin_training(self) -> Snapshot | None:
        """The last thing before the first batch. On a replacement: joins the others; returns where they go on."""
        session = self.session
        if session.newborn:
            session.journal.close()
            return self._recover("")
        taken = self.host.begin()
        session.mirrors.begin("tail", taken.step, taken.private_bytes())
        session.mirrors.settle()
        session.arm()
        return None

    def end_training(self) -> None:
        """The last thing in a fit: from here on nobody needs to go back."""
        self.session.disarm()

    def recover_from(self, error: Exception) -> Snapshot | None:
        """Recovers from a fault that surfaced as ``error``; returns where training goes on.

        Raises:
            RecoveryError: If the run cannot go on; ``error`` itself where it was this rank's own.
        """
        raised = "" if self._is_from_outside(error) else f"{type(error).__name__}: {error}"
        if raised:
            log.warning("rank %d: %s", self.global_rank, raised, exc_info=error)
        error.__traceback__ = None  # its frames hold process groups and half a step's activations
        try:
            return self._recover(raised)
        except RecoveryError as final:
            if raised:
                raise error from final
            raise

    def _recover(self, raised: str) -> Snapshot | None:
        session = self.session
        try:
            outcome = session.recovery.recover(self.state, self.host, session.newborn, raised)
        except RecoveryError as final:
            session.generations.give_up(str(final))
            raise
        session.newborn = False
        if self.global_rank == min(set(range(self.world_size)) - set(outcome.replaced)):
            say(describe(outcome))
        return self.host.resume

    def _is_from_outside(self, error: Exception) -> bool:
        return isinstance(error, (CollectiveError, Interrupted)) or cpu.is_collective_failure(error)

    # Lightning's own collectives

    def barrier(self, name: str | None = None) -> None:
        """Waits until all ranks are here."""
        if name is not None and self._session is not None:
            self.session.journal.mark(name)
        if self._session is not None and not self.session.journal.reading:
            self.session.wait(dist.barrier(async_op=True))

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Gives every rank the object of rank ``src``."""
        if self._session is None:
            return obj
        return self.session.journal.entry(lambda: objects.broadcast(obj, src, self.session.wait))

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor over ranks; anything else is returned as it is."""
        if not isinstance(tensor, Tensor) or self._session is None:
            return tensor
        return self.session.journal.entry(lambda: objects.reduce(tensor, group, reduce_op, self.session.wait))

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Stacks the tensors of all ranks."""
        if self._session is None:
            return tensor
        if sync_grads:
            return _all_gather_ddp_if_available(tensor, group=group, sync_grads=True)
        gathered: Tensor = self.session.journal.entry(lambda: objects.all_gather(tensor, group, self.session.wait))
        return gathered

    # Checkpoints, so far

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Nothing yet: checkpoints hold the weights."""
        rank_zero_warn(
            "`replica_zero` checkpoints hold weights but no optimizer state yet; training cannot resume from one."
        )
        return {}

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Refuses: there is no optimizer state to go on from."""
        raise ConfigurationError(
            "`replica_zero` cannot resume training from a checkpoint yet (`fit(ckpt_path=...)`)."
            " Load the weights with `load_from_checkpoint` and start anew."
        )

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights, copied: as views they would drag the whole flat buffer along."""
        state = super().lightning_module_state_dict()
        return {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in state.items()}


def _check_numbers(**numbers: float) -> None:
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 1:
            raise ConfigurationError(f"{name}={value!r} must be a number, 1 or more.")
