"""`ReplicaOptimizer`: an optimizer that shards its state and keeps every shard R times, for any training loop."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from lightning_replica.core import checks
from lightning_replica.core.digests import digest, words_of
from lightning_replica.core.grid import Grid
from lightning_replica.devices.host import on_host
from lightning_replica.errors import ConfigurationError, CorruptedShardError, UncollectedStateError
from lightning_replica.groups.membership import groups_within
from lightning_replica.sharding import moving, shared
from lightning_replica.sharding.arguments import check_dense, check_optimizer_class, group_of
from lightning_replica.sharding.in_place import InPlace, gather_in_place
from lightning_replica.sharding.layout import Partition
from lightning_replica.sharding.listing import shard_tensors
from lightning_replica.sharding.optimizer import ShardedOptimizer
from lightning_replica.sharding.settings import EngineSettings
from lightning_replica.sharding.whole import gather_optimizer, load_optimizer

_MASK = 2**64 - 1
_MAIN = "main_parameters"


class ReplicaOptimizer(Optimizer, Joinable):
    """An optimizer each of whose R x S ranks updates one of S shards of the parameters, and sends it to the others.

    It stands where torch's ``ZeroRedundancyOptimizer`` stands, and has its methods: beside DDP, which averages
    gradients, or alone, if every rank computes the same ones. The state of a shard is on R ranks, so it outlives the
    loss of R - 1 of them: `export_shard` and `import_shard` move it to another process. Recovery itself is what
    `ReplicaZeroStrategy` adds.

    Args:
        params: Parameters or param groups, the same on all ranks.
        optimizer_class: The class of the optimizer of each shard.
        replicas: Holders of every shard, R. It must divide the number of ranks.
        process_group: The ranks; None for the default group.
        partition: "element" cuts parameters anywhere, for optimizers that update every element on its own; "parameter"
            keeps them whole.
        shared_memory: Whether ranks on one machine's CPU read each other's memory instead of sending.
        timeout_s: Time after which a collective fails on its own, in seconds.
        **defaults: Arguments of ``optimizer_class``.

    Raises:
        ConfigurationError: If R does not divide the number of ranks, the optimizer or a parameter cannot be sharded, or
            an argument is one of torch's or FairScale's sharded optimizers only.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        replicas: int = 2,
        process_group: dist.ProcessGroup | None = None,
        partition: Partition = "element",
        shared_memory: bool = True,
        timeout_s: float = 1800.0,
        **defaults: Any,
    ) -> None:
        check_optimizer_class(optimizer_class, defaults)
        optimizer = optimizer_class(params, **defaults)
        self._shard(optimizer, replicas, process_group, partition, shared_memory, timeout_s)

    @classmethod
    def of(
        cls,
        optimizer: Optimizer,
        replicas: int = 2,
        process_group: dist.ProcessGroup | None = None,
        partition: Partition = "element",
        shared_memory: bool = True,
        timeout_s: float = 1800.0,
    ) -> ReplicaOptimizer:
        """Shard the state of an optimizer that exists. Collective.

        It stays the object that updates, so its hooks are called, and schedulers that were made for it have an effect.
        Do not call its ``step`` any more.

        Args:
            optimizer: The optimizer. If it has state already, that must be the same on all ranks.
            replicas: See the class, as for all others.
            process_group: The ranks.
            partition: How parameters are cut.
            shared_memory: Whether ranks on one machine's CPU read each other's memory.
            timeout_s: Time after which a collective fails on its own, in seconds.

        Raises:
            ConfigurationError: If R does not divide the number of ranks, or the optimizer cannot be sharded.
        """
        made = cls.__new__(cls)
        made._shard(optimizer, replicas, process_group, partition, shared_memory, timeout_s)
        for peers in made._unlike():
            raise ConfigurationError(
                f"The {type(optimizer).__name__} of ranks {', '.join(map(str, peers))} has state already, and not the"
                " same on each. Load the same state on all ranks, or shard the optimizer before its first step."
            )
        return made

    def _shard(
        self,
        optimizer: Optimizer,
        replicas: int,
        process_group: dist.ProcessGroup | None,
        partition: Partition,
        shared_memory: bool,
        timeout_s: float,
    ) -> None:
        Joinable.__init__(self)
        checks.whole(1, replicas=replicas)
        self._group = group_of(process_group)
        self._is_made = False
        Optimizer.__init__(self, optimizer.param_groups, optimizer.defaults)
        self.optim = optimizer
        self._share()
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self._groups = groups_within(
            self._group, replicas, timedelta(seconds=timeout_s), all(on_host(parameter) for parameter in parameters)
        )
        self._equalize(parameters)
        settings = EngineSettings(
            sys.maxsize,  # one bucket: nothing is reduced, so nothing is gained by several
            partition,
            manual=True,
            shared_memory=shared_memory and self._groups.on_host,
            recoverable=False,
        )
        rank = self._groups.rank
        replica = Grid(self._groups.grid.replica_ranks(rank), 1)
        self._sharded: ShardedOptimizer[InPlace] = ShardedOptimizer(
            self.optim, parameters, [replica], rank, settings, InPlace
        )
        self._can_map = settings.shared_memory
        self._map()
        self._whole: dict[str, Any] | None = None
        self._is_made = True

    # A step

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update the own shard with the gradients in ``.grad``, and gather all parameters. Collective.

        Args:
            closure: Computes the loss and its gradients; called once, before the update.
            **kwargs: Further arguments of ``optimizer_class.step``.

        Returns:
            What the closure returned.
        """
        Join.notify_join_context(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._join_config.enable:
            self._share_gradients(has_inputs=True)
        self._update(**kwargs)
        return loss

    @torch.no_grad()
    def _update(self, **kwargs: Any) -> None:
        self._follow_groups()
        for values in self._sharded.buffers:
            values.reclaim()
            if not values.is_params():
                values.main_from_params()
            values.used = values.present()
        self._sharded.update(lambda gradients: None, **kwargs)
        gather_in_place(self._sharded.buffers, self._groups, _go_on, self._memory)
        self._whole = None

    @torch.no_grad()
    def _share_gradients(self, has_inputs: bool) -> None:
        """Give ranks without inputs the gradients of the first rank that has some. Collective.

        DDP's join hook reduces with them, but leaves what their last inputs gave in ``.grad``. torch's
        ``ZeroRedundancyOptimizer`` updates their shards with that.
        """
        have = torch.zeros(self._groups.grid.size, dtype=torch.int64, device=self.join_device)
        have[self._groups.place] = int(has_inputs)
        dist.all_reduce(have, group=self._group)
        source = self._groups.grid.ranks[int(have.argmax())]
        if int(have.sum()) == len(have):
            return
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        present = [parameter.grad is not None for parameter in parameters]
        flags = torch.tensor(present, dtype=torch.uint8, device=self.join_device)
        dist.broadcast(flags, source, group=self._group)
        for parameter, is_present in zip(parameters, flags.tolist(), strict=True):
            gradient = None
            if is_present:
                gradient = torch.empty_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
                dist.broadcast(gradient, source, group=self._group)
            if not has_inputs:
                parameter.grad = gradient

    def shadow(self) -> None:
        """Make the step that ranks with inputs make, on a rank without. Collective; `join_hook` calls it."""
        self._share_gradients(has_inputs=False)
        self._update()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group; all ranks must add the same. Its state is sharded in the next step.

        Raises:
            ConfigurationError: If a parameter cannot be sharded.
        """
        params = param_group["params"]
        param_group = {**param_group, "params": params if isinstance(params, Tensor) else list(params)}
        check_dense(param_group["params"])
        if not self._is_made:
            super().add_param_group(param_group)
            return
        self.optim.add_param_group(param_group)  # to the list that both have
        added = self.param_groups[-1]["params"]
        self._equalize(added)
        self._sharded.admit(added)

    # State

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect the whole state on one rank. Collective.

        Args:
            to: The rank, in the process group; `state_dict` works there afterwards.

        Raises:
            ConfigurationError: If there is no such rank.
            CorruptedShardError: On all ranks, if holders of a shard do not have the same bits.
        """
        checks.choice("to", to, tuple(range(self._groups.grid.size)))
        self._follow_groups()
        self.compare_shards()
        found = gather_optimizer(self._sharded, self._groups, _go_on, to)
        self._whole = None
        if self._groups.place == to:
            self._whole = {**found.state_dict, **({_MAIN: found.main} if found.main else {})}

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, as ``optimizer_class`` would without sharding.

        Where parameters have 16 bits, their values in 32 bits are in it too, which other optimizers pass over.

        Raises:
            UncollectedStateError: If `consolidate_state_dict` has not collected it on this rank since the last step.
        """
        if self._whole is None:
            raise UncollectedStateError(
                f"Rank {self._groups.place} does not have the whole state. Call `consolidate_state_dict(to="
                f"{self._groups.place})` on all ranks before, and after the last step."
            )
        return self._whole

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's part of a whole state, which any optimizer of the class may have written.

        Args:
            state_dict: The state. The parameters must already hold the values that belong to it.

        Raises:
            ConfigurationError: If it is of other parameters.
        """
        self._follow_groups()
        for values in self._sharded.buffers:
            values.reclaim()
            values.main_from_params()
        load_optimizer(self._sharded, state_dict, state_dict.get(_MAIN))
        self._share()

    # Shards, for recovery by others

    @property
    def shard(self) -> int:
        """The number of this rank's shard, from 0 to S - 1."""
        return self._groups.shard

    @property
    def peers(self) -> tuple[int, ...]:
        """The R ranks that hold this rank's shard, itself included, by their global numbers."""
        return self._groups.grid.peers(self._groups.rank)

    def export_shard(self) -> tuple[dict[str, Any], list[Tensor]]:
        """Return this rank's shard: plain data, and flat tensors in an order that `import_shard` knows."""
        return moving.export_shard([self._sharded], with_gradients=False)

    def import_shard(self, manifest: dict[str, Any], receive: Callable[[Tensor], None]) -> None:
        """Take a peer's shard; the parameters of all ranks are the same again after the next step.

        Args:
            manifest: The plain data that the peer's `export_shard` returned.
            receive: Fills one flat tensor after the other, in the order of the peer's list.
        """
        self._sharded.follow_layout(manifest["layouts"][0])
        moving.import_shard([self._sharded], manifest, receive)
        for values in self._sharded.buffers:
            values.params_from_main()  # otherwise a step would take them for what user code has written

    def shard_digest(self) -> int:
        """Return the sum of the 64-bit words of this rank's shard, which is the same on all of its peers."""
        return sum(digest(tensor, 0, words_of(tensor)) for _, tensor in shard_tensors([self._sharded])) & _MASK

    def compare_shards(self) -> None:
        """Raise an error unless all holders of each shard have the same bits. Collective.

        Holders make the same updates if they have the same gradients. `consolidate_state_dict` calls this, so that no
        checkpoint is made of shards that differ.

        Raises:
            CorruptedShardError: On all ranks, with the holders of the first shard that is not the same on all of them.
        """
        for peers in self._unlike():
            raise CorruptedShardError(
                f"Ranks {', '.join(map(str, peers))} hold the same shard, but not with the same bits. Gradients must be"
                " the same on all ranks when the optimizer steps: average them, as DistributedDataParallel does, and"
                " change them alike on all ranks. Go on from an earlier checkpoint."
            )

    # Join

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook with which a rank without further inputs goes on making steps, in torch's ``Join``."""
        return _Shadow(self)

    @property
    def join_device(self) -> torch.device:
        """The device of the parameters."""
        device: torch.device = self.param_groups[0]["params"][0].device
        return device

    @property
    def join_process_group(self) -> Any:
        """The process group."""
        return self._group

    def _share(self) -> None:
        """Let this object and the optimizer of the shard have the same param groups."""
        self.param_groups = self.optim.param_groups
        self.state = self.optim.state

    def _equalize(self, parameters: Iterable[Tensor]) -> None:
        """Give all ranks the parameters of the first, as DDP does: otherwise holders of a shard would differ."""
        for parameter in parameters:
            dist.broadcast(parameter.data, self._groups.grid.ranks[0], group=self._group)

    def _unlike(self) -> list[tuple[int, ...]]:
        """Return the holders of each shard that is not the same on all of them; the same on all ranks. Collective."""
        grid = self._groups.grid
        if grid.replicas == 1:
            return []
        own = torch.tensor([self.shard_digest() - 2**63], device=self.join_device)
        found = [torch.empty_like(own) for _ in grid.ranks]
        dist.all_gather(found, own, group=self._group)
        of_rank = {rank: int(each) for rank, each in zip(grid.ranks, found, strict=True)}
        shards = sorted({grid.peers(rank) for rank in grid.ranks})
        return [peers for peers in shards if len({of_rank[rank] for rank in peers}) > 1]

    def _follow_groups(self) -> None:
        new, gone = self._sharded.follow_groups()
        if new or gone:
            self._map()

    def _map(self) -> None:
        blocks = [(values.block, values.main_numels) for values in self._sharded.buffers]
        self._memory = shared.connect(self._groups, _go_on, blocks) if self._can_map else None


class _Shadow(JoinHook):
    """Makes a step wherever the ranks that have inputs make one."""

    def __init__(self, optimizer: ReplicaOptimizer) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        """Update the own shard with the gradients of a rank that has inputs, and gather."""
        self._optimizer.shadow()


def _go_on() -> None:
    """Never raise: nothing calls ranks away from a collective here."""
