"""`ReplicaZeroStrategy`: the strategy that Lightning calls."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_replica._compat.dtensor import is_shared, like, local_of
from lightning_replica._compat.lightning import after_saves, give_mesh, writes_archives
from lightning_replica._compat.lightning_names import (
    Accelerator,
    CheckpointIO,
    ClusterEnvironment,
    DDPStrategy,
    ParallelStrategy,
    Precision,
    TrainerFn,
    _StrategyRegistry,
    pl,
    rank_zero_only,
    reset_seed,
)
from lightning_replica._compat.packages import describe
from lightning_replica._compat.swa import leave_functions_out_of_states
from lightning_replica.checkpoint.archive import can_be_checked, check_archive, reading
from lightning_replica.checkpoint.location import Location, locate
from lightning_replica.checkpoint.which_storage import storage_of
from lightning_replica.control.run_on_rank0 import run_on_rank0
from lightning_replica.core import checks
from lightning_replica.core.digests import GuardMode
from lightning_replica.core.grids import Grids
from lightning_replica.core.inexact import Report, warn
from lightning_replica.core.messages import say
from lightning_replica.core.options import OnInexact, RecoveryOptions
from lightning_replica.core.points import begin
from lightning_replica.devices import device_for
from lightning_replica.devices.host import HOST
from lightning_replica.devices.interface import Device
from lightning_replica.errors import ConfigurationError, ReplicaError
from lightning_replica.launch.choice import check_devices, environment_of_rank, is_rank, launcher_for, rank_context
from lightning_replica.sharding.engine import Engine, EngineSettings, Partition, ReduceDtype
from lightning_replica.state import logger_runs
from lightning_replica.state.snapshot import Snapshot
from lightning_replica.trainer import fit_loop
from lightning_replica.trainer.collectives import Collectives
from lightning_replica.trainer.extension import extension
from lightning_replica.trainer.hooks import combined
from lightning_replica.trainer.joining import Joining, UnevenInputs, check_uneven_inputs
from lightning_replica.trainer.lengths import check_sized
from lightning_replica.trainer.model_part import ModelPart
from lightning_replica.trainer.precision import ShardedStep, fit_to_device, sharded
from lightning_replica.trainer.saving.checkpoints import Checkpoints, StateDictType, absent, is_absent
from lightning_replica.trainer.saving.run_checkpoints import RunCheckpoints
from lightning_replica.trainer.saving.which_checkpoint import Resume, WhichCheckpoint
from lightning_replica.trainer.session import Session, join
from lightning_replica.trainer.steps import Training
from lightning_replica.trainer.tensor_parallel import TensorParallel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger(__name__)


@dataclass
class _RepeatedTail:
    """The tail of a step that is done again: its update has been made.

    Attributes:
        snapshot: What was taken when the commit was entered.
        reached: Whether the user's code has called `optimizer_step` again.
    """

    snapshot: Snapshot
    reached: bool = False


class ReplicaZeroStrategy(ParallelStrategy):
    """Data parallelism with sharded optimizer state, every shard held by several ranks; a lost rank is replaced.

    Args:
        replicas: Copies of the optimizer state, R. It must divide the number of ranks. ``replicas - 1`` holders of a
            shard may be lost at a time. 1 shards without redundancy.
        partition: "element" cuts parameters anywhere, for optimizers that update every element on its own. "parameter"
            keeps parameters whole, for all other optimizers (Muon, Adafactor ...).
        whole_gradients: Whether every ``.grad`` is the averaged gradient after backward, as under DDP. This costs a
            gather. Without it, ``.grad`` is only a part, and clipping is done in the update. "auto" turns it on where
            user code may look at gradients: under manual optimization, with hooks such as ``on_before_optimizer_step``,
            and where the code of your module or callbacks reads an attribute ``grad`` or names a function of torch's or
            Lightning's that does. It does not look into other packages. If that code runs after the update, or with
            True, a copy of the gradients is kept, which goes back with the step after a fault.
        state_dict_type: "full" writes checkpoints that every other strategy loads, gathered on rank 0. "sharded" writes
            directories (PyTorch Distributed Checkpoint), all ranks in parallel. Any number of ranks can load both.
            "auto" is "sharded" under tensor parallelism, where nothing else is possible, and "full" elsewhere.
        shared_memory: Whether ranks on one machine's CPU read each other's memory where they can, instead of sending.
        guard: How much of its shard (values and optimizer state) every rank checks for bits that change by themselves
            and compares with its peers before each update. "full": all of it. "sampled": a different part in each step,
            and all of it within 64 steps. Wrong bits outside of that part are found only when their part is checked,
            after the steps in between were computed from them. "off": nothing. A rank whose memory changed at rest gets
            its shard from a peer. If an update itself went wrong, the majority of the holders is right; with
            ``replicas=2`` the run ends with an error.
        bucket_bytes: Size of the buckets in which gradients are sent; None is 16 MiB on one node, 4 MiB on several.
        reduce_dtype: The dtype in which gradients leave a node: "bfloat16" sends half of 32 bits. Gradients of 16-bit
            parameters are then accumulated in 32 bits, apart from ``.grad``. None: as they are.
        tensor_parallel_size: Ranks that share every layer which ``configure_model`` gives to ``parallelize_module``,
            over ``self.device_mesh["tensor_parallel"]``. Then ``replicas`` must divide the number of the others, which
            train on different data. See docs/tensor_parallel.md.
        uneven_inputs: "join": ranks may have different numbers of training batches. A rank whose data has ended shadows
            the others' steps, until no rank has inputs. None: different numbers are an error. See
            docs/uneven_inputs.md.
        divide_by_initial_world_size: With ``uneven_inputs``, whether gradients are averaged over all ranks, or over
            those that have a batch in the step.
        recovery: Whether the run recovers from faults. Without it, training is sharded in the same way and gives the
            same bits, but the first fault ends the run.
        max_restarts: Processes that may be replaced in one run.
        standby: Processes that have imported everything and wait to take a lost rank's place. Each takes some hundred
            MB. Without one, a replacement has to import torch and lightning first.
        max_tries: Recoveries at one step before the run ends.
        on_inexact: What follows if something turns out not to be restored exactly by a recovery: state that cannot be
            put back or sent, or a batch that is done again with another loss or gradient. "report" says what, in the
            log and in the incident; "raise" also ends the run.
        timeout_s: Time after which a collective fails on its own, in seconds.
        rendezvous_timeout_s: How long ranks wait for each other and for a replacement, in seconds.
        hang_min_s: The shortest time without progress, in seconds, after which a rank counts as hanging, and is killed
            and replaced. Each rank learns a time-out for each position in a step: five times the longest time that it
            was busy there.
        hang_max_s: The longest such time, in seconds; it holds where nothing has been learnt yet. ``float("inf")`` for
            both turns hang detection off. It works on Linux, where the supervisor has started the ranks; other
            launchers replace no ranks. See docs/hangs.md.
        resume: "auto": a ``fit`` that is given no ``ckpt_path`` resumes from the newest whole checkpoint in the
            directories of `DyingGaspCheckpoint` and `CheckpointPublisher`, if there is one.
        accelerator: As in every Lightning strategy.
        parallel_devices: As in every Lightning strategy.
        cluster_environment: As in every Lightning strategy.
        checkpoint_io: As in every Lightning strategy.
        precision_plugin: As in every Lightning strategy.

    Raises:
        ConfigurationError: If a value makes no sense. Some values are checked once the number of ranks is known.
    """

    strategy_name = "replica_zero"
    is_distributed = True  # without it Lightning adds no distributed sampler

    def __init__(
        self,
        replicas: int = 2,
        partition: Partition = "element",
        whole_gradients: bool | Literal["auto"] = "auto",
        state_dict_type: StateDictType | Literal["auto"] = "auto",
        shared_memory: bool = True,
        guard: GuardMode = "sampled",
        bucket_bytes: int | None = None,
        reduce_dtype: ReduceDtype | None = None,
        tensor_parallel_size: int = 1,
        uneven_inputs: UnevenInputs = None,
        divide_by_initial_world_size: bool = True,
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
        cluster_environment = cluster_environment or environment_of_rank()
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        checks.whole(1, replicas=replicas, tensor_parallel_size=tensor_parallel_size)
        checks.seconds(timeout_s=timeout_s)
        self._given_options = RecoveryOptions(
            recovery=recovery,
            max_tries=max_tries,
            on_inexact=on_inexact,
            guard=guard,
            max_restarts=max_restarts,
            standby=standby,
            hang_min_s=hang_min_s,
            hang_max_s=hang_max_s,
            rendezvous_timeout_s=rendezvous_timeout_s,
        )
        checks.choice("state_dict_type", state_dict_type, ("auto", "full", "sharded"))
        checks.choice("resume", resume, (None, "auto"))
        check_uneven_inputs(uneven_inputs, divide_by_initial_world_size, tensor_parallel_size)
        checks.choice("whole_gradients", whole_gradients, (True, False, "auto"))
        self._sharding = EngineSettings(
            bucket_bytes=bucket_bytes, partition=partition, shared_memory=shared_memory, reduce_dtype=reduce_dtype
        )
        self._whole_gradients = whole_gradients
        self._replicas = replicas
        self._timeout_s = timeout_s
        self._resume = resume
        self._num_nodes = 1
        self._uneven_inputs = uneven_inputs
        self._divides_by_all = divide_by_initial_world_size
        self._collectives = Collectives()
        self._training: Training | None = None
        self._run_checkpoints: RunCheckpoints | None = None
        self._tensor = TensorParallel(tensor_parallel_size)
        self._mesh: DeviceMesh | None = None
        self._checkpoints = Checkpoints(self._tensor.form_of_checkpoints(state_dict_type, partition))
        self._accumulating = False
        self._repeated_tail: _RepeatedTail | None = None

    def __repr__(self) -> str:
        """Say which package of Lightning this object is for: the other one shows it in its error."""
        return describe(self)

    # Ranks and devices

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Register this class for ``Trainer(strategy="replica_zero")``."""
        description = (cls.__doc__ or "").partition("\n")[0]
        strategy_registry.register(cls.strategy_name, cls, description=description, override=True)

    @property
    def num_nodes(self) -> int:
        """Number of nodes; more than one only under a launcher that starts ranks on all of them."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        if num_nodes != 1 and not is_rank(self.cluster_environment):
            raise ConfigurationError(
                f"{num_nodes=}: `python train.py` starts the ranks of one node. Start the script on all nodes with"
                f" `lightning-replica run --nnodes={num_nodes} --nproc-per-node=... train.py`, which replaces lost"
                " nodes, with torchrun or with SLURM, or set `num_nodes=1`."
            )
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Number of ranks on this node."""
        return len(self.parallel_devices or ())

    @property
    def world_size(self) -> int:
        """Number of ranks on all nodes."""
        return self._num_nodes * self.num_processes

    @property
    def grids(self) -> Grids:
        """Which rank owns which shard: one grid, or one for each tensor rank."""
        return self._tensor.grids(self.world_size, self._replicas, self._num_nodes)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of the sampler, by which every rank reads its own part of the data; tensor ranks read the same."""
        return {"num_replicas": self._tensor.copies(self.world_size), "rank": self._tensor.copy(self.global_rank)}

    @property
    def device_mesh(self) -> "DeviceMesh":
        """The mesh of all ranks, with the dimensions "data_parallel" and "tensor_parallel", as under Lightning's own.

        Raises:
            ReplicaError: Without tensor parallelism, or before the ranks are set up.
        """
        if self._mesh is None:
            raise ReplicaError(
                "There is no device mesh: it exists with `ReplicaZeroStrategy(tensor_parallel_size=...)` of at least 2,"
                " from `configure_model` on."
            )
        return self._mesh

    def part(self) -> ModelPart:
        """Return which part of the model this rank has."""
        return self._tensor.part(self.lightning_module, self.global_rank)

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        return (self.parallel_devices or [HOST])[self.local_rank]

    @property
    def precision_plugin(self) -> ShardedStep:
        """The precision plugin, with the sharded step: the commit carries what clipping and loss scaling need."""
        if self._precision_plugin is None:  # not in `__init__`: Lightning would take it for the user's choice
            self._precision_plugin = sharded(Precision())
        return cast("ShardedStep", self._precision_plugin)

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = None if precision_plugin is None else sharded(precision_plugin)

    # Setting up

    def _configure_launcher(self) -> None:
        check_devices(self.world_size)
        size = self.grids.size  # raises in the first process, before any rank waits for another
        fit_to_device(self.precision_plugin, self._device().kind, self.accelerator)
        if size == 1 and not is_rank(self.cluster_environment):
            say("one rank has no peers: nothing is protected. Set `Trainer(devices=2)` or more.")
        self._launcher = launcher_for(
            self.cluster_environment,
            self.num_processes,
            self.num_nodes,
            extension().overridden(self._given_options),
            self.options_for,
            WhichCheckpoint(extension().resume(self._resume), self._on_rank0).fill_in,
            logger_runs.hand_over,
        )

    def _on_rank0(self, work: Callable[[], str]) -> str:
        rank = self.node_rank * self.num_processes + self.local_rank  # `set_world_ranks` has not been called yet
        store = rank_context(self.cluster_environment, rank, self.num_nodes).connect()
        return run_on_rank0(rank, store, work, self._given_options.rendezvous_timeout_s)

    def _device(self) -> Device:
        return device_for(self.root_device, self.accelerator)

    def options_for(self, trainer: Any) -> RecoveryOptions:
        """Return the recovery options that the arguments, the trainer's callbacks and the extension set together.

        Raises:
            ConfigurationError: If they contradict each other.
        """
        return extension().overridden(combined(self._given_options, trainer.callbacks if trainer is not None else ()))

    def set_world_ranks(self) -> None:
        """Tell the cluster environment the rank of this process and the world size."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.world_size)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def setup_environment(self) -> None:
        """Set up this process and, if it is a rank, join the world."""
        super().setup_environment()
        leave_functions_out_of_states()
        reset_seed()
        self.set_world_ranks()
        if is_rank(self.cluster_environment):
            trainer = self.lightning_module.trainer if self.lightning_module is not None else None
            options = self.options_for(trainer)
            enter = partial(rank_context, self.cluster_environment, self.global_rank, self.num_nodes)
            session = join(self.grids, self.global_rank, enter, self._device(), self._timeout_s, options)
            self._collectives.session = session
            if trainer is not None:
                session.handoff.journal.may_leave_out(partial(getattr, trainer, "sanity_checking"))
                if session.is_replacement:
                    session.handoff.leave_out(trainer, session.fits, self.is_global_zero)
            self._make_mesh()
            if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
                extension().enter(trainer)

    def _make_mesh(self) -> None:
        """Give the LightningModule a mesh of all devices, for its ``configure_model``. Collective."""
        if not self._tensor.on:
            return
        if self._mesh is None:
            self._mesh = self._tensor.mesh(self._device().kind, self.world_size)
        if self.lightning_module is not None:
            give_mesh(self.lightning_module, self._mesh)

    def setup(self, trainer: pl.Trainer) -> None:
        """Set up the model and, for a fit, lay out the parameters and shard the optimizers."""
        if self.accelerator is not None:
            self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if self.model is not None:
            if fitting and self._layer_sync is not None:
                self.model = self._layer_sync.apply(self.model)
            self.model = self.precision_plugin.convert_module(self.model)
        self._tensor.check(trainer.lightning_module, self.global_rank)
        self.model_to_device()
        if not self.session.is_replacement:
            self._sync_module()
        if fitting:
            self._setup_fit(trainer)
        self.setup_precision_plugin()

    def _sync_module(self) -> None:
        """Give every rank of a grid the parameters and buffers of its first, as under DDP.

        What all tensor ranks have is rank 0's everywhere.
        """
        if self.model is None:
            return
        part, world = self.part(), self.session.world
        with torch.no_grad():
            for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
                own = local_of(tensor)
                members = world.groups.of_grids[part.is_expert(name)].members
                group = world.groups.world if self._tensor.on and is_shared(tensor) else members
                work = dist.broadcast(own.data, group=group, group_src=0, async_op=True)
                world.wait(work, own)

    def model_to_device(self) -> None:
        """Move the model to this rank's device, unless all of it is there: torch cannot move a DTensor at any time."""
        if self.model is None:
            return
        tensors = (*self.model.parameters(), *self.model.buffers())
        if not self._tensor.on or any(tensor.device != self.root_device for tensor in tensors):
            self.model.to(self.root_device)

    def _setup_fit(self, trainer: pl.Trainer) -> None:
        session = self.session
        moved = session.compare_runtimes()
        session.compare_models(trainer.lightning_module)
        fit_loop.adopt(trainer, self)
        if self._uneven_inputs == "join":
            self._collectives.joining = Joining(trainer, self._divides_by_all)
        if not session.is_replacement:
            session.handoff.leave_note(f"loggers/{session.fits}", logger_runs.record(trainer.loggers))
            logger_runs.leave(session.world.generations.store, self.global_rank)
        self.setup_optimizers(trainer)
        self._training = Training(
            trainer,
            session,
            self.precision_plugin,
            self.optimizers,
            self._sharding,
            self._whole_gradients,
            self.part(),
            self.joining,
        )
        self._run_checkpoints = RunCheckpoints(trainer, self._training, session, self._checkpoints, self.broadcast)
        for name, why in moved.items():
            self._training.inexact.report(name, why, "once")

    def process_dataloader(self, dataloader: object) -> object:
        """Check that all ranks can tell the length of this data, or none."""
        check_sized(dataloader, self)
        return dataloader

    @property
    def session(self) -> Session:
        """The session of this process.

        Raises:
            ReplicaError: If the strategy is not set up.
        """
        return self._collectives.connected()

    @property
    def joining(self) -> Joining | None:
        """Joins ranks with different numbers of batches; None without ``uneven_inputs``."""
        return self._collectives.joining

    @property
    def training(self) -> Training:
        """The fit that is under way, or the last one.

        Raises:
            ReplicaError: Before the first.
        """
        if self._training is None:
            raise ReplicaError("There is no sharded state: it exists only while fitting.")
        return self._training

    @property
    def run_checkpoints(self) -> RunCheckpoints:
        """What writes the checkpoints of callbacks in the fit that is under way, or in the last one.

        Raises:
            ReplicaError: Before the first.
        """
        if self._run_checkpoints is None:
            raise ReplicaError("Nothing can be saved: callbacks write checkpoints while fitting.")
        return self._run_checkpoints

    @property
    def grad_norm(self) -> float | None:
        """The 2-norm of the whole model's gradient in the newest step, before clipping; after it if they are whole.

        None before the first step of a fit, and under manual optimization.
        """
        return None if self._training is None or self._training.manual else self.precision_plugin.gradient[0]

    @property
    def state(self) -> Engine:
        """The sharded state; it exists only while fitting."""
        return self.training.state

    # A step

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Make gradients only accumulate inside the block, without a reduction."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training step."""
        begin("forward")
        step = partial(super().training_step, *args, **kwargs)
        return step() if self.joining is None else self.joining.training_step(step)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's validation step."""
        begin("validation")
        output = super().validation_step(*args, **kwargs)
        loop: Any = self.lightning_module.trainer.fit_loop.epoch_loop.val_loop if self.lightning_module else None
        begin("validation_end" if loop is not None and loop.batch_progress.is_last_batch else "validation_batch_end")
        return output

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward pass with the reduction around it, so that hooks after it see the reduced gradients."""
        plugin, module = self.precision_plugin, self.lightning_module
        if module is None:
            raise ReplicaError("There is no LightningModule: `backward` is called while fitting.")
        begin("backward")
        closure_loss = plugin.pre_backward(closure_loss, module)
        self._run_backward(partial(plugin.backward, closure_loss, module, optimizer, *args, **kwargs), closure_loss)
        loss: Tensor = plugin.post_backward(closure_loss, module)
        return loss

    def _run_backward(self, backward: Callable[[], None], loss: Tensor) -> None:
        """Run ``backward`` and the reduction of the gradients that it computes from ``loss``."""
        self.training.before_backward(self._accumulating, loss)
        backward()
        self.training.after_backward(self._accumulating)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Make one step. In a tail that is done again, only return the result of the closure."""
        if self._repeated_tail is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        self._repeated_tail.reached = True
        self.training.return_to_commit(self._repeated_tail.snapshot)
        return closure()

    @contextmanager
    def step_is_done(self, tail: Snapshot) -> Iterator[None]:
        """Make `optimizer_step` skip the update, which has been made: inside the block only hooks are called again.

        What the hooks have done before they call `optimizer_step` is in the snapshot ``tail``, so it is undone there.
        """
        self._repeated_tail = repeated = _RepeatedTail(tail)
        try:
            yield
        finally:
            self._repeated_tail = None
        if not repeated.reached:
            self.report_inexact(
                f"`optimizer_step` of {type(self.lightning_module).__name__}",
                "it has made a step, and did not call the strategy when it was called again after a fault, because"
                " something that it reads had changed by then: what it does after the step is left out",
                "once",
            )
            self.training.return_to_commit(tail)

    @property
    def report_inexact(self) -> Report:
        """Called with what is not restored exactly after a fault; see `core.inexact`."""
        return warn if self._training is None else self._training.inexact.report

    def on_validation_end(self) -> None:
        """Note that hooks of a validation may have changed weights."""
        if self._training is not None:
            self._training.weights_may_differ()

    # Collectives

    def barrier(self, name: str | None = None) -> None:
        """Wait until all ranks have reached this barrier."""
        self._collectives.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank ``src`` on every rank."""
        return self._collectives.broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over ranks; return anything else unchanged."""
        return self._collectives.reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the stacked tensors of all ranks."""
        return self._collectives.all_gather(tensor, group, sync_grads)

    def by_itself(self) -> AbstractContextManager[None]:
        """Make collectives involve no other rank inside the block, and return what this rank has."""
        return self._collectives.by_itself()

    # Checkpoints. Those that callbacks write are in `run_checkpoints`.

    @property
    def _is_replacement(self) -> bool:
        """Whether this is a replacement that has not joined. Without a session, the module is saved as it is."""
        session = self._collectives.session
        return session is not None and session.is_replacement

    @property
    def _is_cut_off(self) -> bool:
        """Whether the run has failed, so that this rank can no longer get others' shards."""
        session = self._collectives.session
        return session is not None and session.world.is_over and self.world_size > 1

    @property
    def _is_fitting(self) -> bool:
        return self.lightning_module is not None and self.lightning_module.trainer.state.fn == TrainerFn.FITTING

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights, on rank 0 as copies: with views, the whole flat buffer would be saved."""
        begin("checkpoint")  # Lightning calls this method first when it saves a checkpoint; user hooks follow
        if self._checkpoints.is_sharded(self._training):
            return self._checkpoints.stand_in()
        state = super().lightning_module_state_dict()
        if not self.is_global_zero:
            return state
        return {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in state.items()}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole state of an optimizer, in torch's format, on rank 0. Collective."""
        if self._is_replacement or self._is_cut_off:
            return {}
        return self._checkpoints.optimizer_state(self.training, optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint in the form of ``state_dict_type``. A replacement that has not joined yet writes none.

        Raises:
            ConfigurationError: Outside of a fit of a model that is divided among ranks: there are no shards, and no
                rank has all of it.
        """
        if self._training is None and self.part().name:
            raise ConfigurationError(
                f"{filepath} cannot be written outside of a fit: no rank has all of the model. Save it while fitting."
            )
        if self._is_replacement:
            return
        if self._is_cut_off:
            if self.is_global_zero:
                log.warning(
                    "%s is not written: the run has failed, and ranks can no longer get each other's shards. To save"
                    " what is left in such a case, add the callback `DyingGaspCheckpoint`.",
                    filepath,
                )
            return
        if self._training is not None and self.lightning_module is not None:
            self._training.records.files.is_written(filepath)
            self._checkpoints.complete(self.lightning_module.trainer, self.training, checkpoint)
            if self._checkpoints.is_sharded(self._training):
                self._checkpoints.save_sharded(self.training, self.lightning_module, checkpoint, locate(filepath))
                return
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, after all that is still being written: that one is to take its place.

        A replacement that has not joined yet removes none.
        """
        if not self._is_replacement:
            if self._training is not None:
                self._training.records.files.is_removed(filepath)
            after_saves(self.checkpoint_io, partial(super().remove_checkpoint, filepath))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint of either form; of a model that is divided, outside of a fit, only this rank's weights.

        Raises:
            CheckpointError: If it is damaged.
            ConfigurationError: If it is not of this model's parts.
        """
        path = locate(checkpoint_path)
        if self._is_replacement and not storage_of(path).exists():
            return absent(path)
        checkpoint = self._checkpoints.open(path, self._is_fitting)
        if checkpoint is None:
            # Another plugin checks what it has written by itself; a replacement gets its state from a peer.
            if writes_archives(self.checkpoint_io) and not self._is_replacement and can_be_checked(path):
                check_archive(path)
            with reading(path):
                checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        return self._of_own_part(checkpoint, path)

    def _of_own_part(self, checkpoint: dict[str, Any], path: Location) -> dict[str, Any]:
        """Return a checkpoint with the weights of this rank's part of the model in place of the whole model's."""
        if not self._tensor.on or self._checkpoints.is_open:
            return checkpoint
        own = self.part().own(checkpoint["state_dict"])
        if self._is_fitting or not own:
            raise ConfigurationError(
                f"{path} holds whole weights, not those of tensor ranks. Load them in `configure_model`,"
                " before `parallelize_module`, or resume from a checkpoint that a run with"
                f" tensor_parallel_size={self._tensor.size} has written."
            )
        known = {} if self.lightning_module is None else self.lightning_module.state_dict(keep_vars=True)
        weights = {name: like(known[name], value) if name in known else value for name, value in own.items()}
        return {**checkpoint, "state_dict": weights}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights, unless they come with the optimizers' shards or from a peer."""
        from_a_peer = self._is_replacement and (self._is_fitting or is_absent(checkpoint))
        if not self._checkpoints.is_open and not from_a_peer:
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part of the optimizer states. A replacement gets it from a peer instead."""
        if not self._is_replacement and self.lightning_module is not None:
            self._checkpoints.load_optimizers(self.training, self.lightning_module, checkpoint)

    def resumption(self, trainer: pl.Trainer) -> Snapshot | None:
        """Return where the fit resumes; None if no checkpoint has been loaded."""
        return self._checkpoints.resumption(trainer, self.session)

    def teardown(self) -> None:
        """Tear down, and give the module's parameters memory of their own again.

        DTensors stay on the devices of their mesh, as under Lightning's `ModelParallelStrategy`.
        """
        if self._tensor.on:
            for part in (self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io):
                if part is not None:
                    part.teardown()
        else:
            super().teardown()
        if self._training is not None:
            self._training.release()


def replica_strategy(trainer: pl.Trainer, user: object) -> ReplicaZeroStrategy:
    """Return the strategy of a trainer, for a callback that needs this one.

    Args:
        trainer: The trainer.
        user: The callback, which the error names.

    Raises:
        ConfigurationError: If the trainer has another strategy.
    """
    strategy = trainer.strategy
    if not isinstance(strategy, ReplicaZeroStrategy):
        raise ConfigurationError(
            f"{type(user).__name__} needs `Trainer(strategy='replica_zero')`, but this Trainer has"
            f" {type(strategy).__name__}. Leave it out, or change the strategy."
        )
    return strategy


# Trainer.fit accepts compiled modules (`torch.compile`) only under certain strategy classes, DDPStrategy among them.
# Nothing is inherited by this. But `isinstance(strategy, DDPStrategy)` is true, so what trains under DDP trains here.
DDPStrategy.register(ReplicaZeroStrategy)
