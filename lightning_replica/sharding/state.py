"""One rank's part in a step: from gradients to the gathered parameters, and back to life after a fault."""

import enum
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_replica.errors import ProtocolError
from lightning_replica.grid import Grid
from lightning_replica.points import reach
from lightning_replica.sharding import collectives
from lightning_replica.sharding.buffers import Buffers
from lightning_replica.sharding.collectives import Groups
from lightning_replica.sharding.layout import plan_layout
from lightning_replica.sharding.optimizer import ShardedOptimizer
from lightning_replica.sharding.reducer import Reducer
from lightning_replica.works import Check, wait


class StepPhase(enum.Enum):
    """How far this rank is in step t -> t+1. Each phase leads to the next; a fault leads to IDLE."""

    IDLE = enum.auto()  # nothing that lasts has changed
    ENTERED = enum.auto()  # the shard's gradient is complete, the commit has begun
    COMMITTED = enum.auto()  # the commit vector is known: the step can no longer be undone
    UPDATING = enum.auto()  # the shard is changing: torn, if a fault comes now


@dataclass(frozen=True)
class Commit:
    """What the world agreed on in the commit of one step.

    Attributes:
        grad_norm_sq: Squared 2-norm of the averaged gradient of all parameters, each element counted once.
    """

    grad_norm_sq: float

    @property
    def vector(self) -> tuple[float, ...]:
        """The plain numbers, as they travel."""
        return (self.grad_norm_sq,)


@dataclass(frozen=True)
class Clip:
    """Gradient clipping that a step asked for: by global 2-norm or by value; None is none."""

    norm: float | None = None
    value: float | None = None


class ShardedState:
    """The sharded parameters, gradients and optimizer of one rank.

    Attributes:
        step: Updates applied to this rank's shard, t.
        phase: How far the step t -> t+1 has come.
        committed: The commit of step t -> t+1, from COMMITTED on.
        clip: Clipping of the step under way.
    """

    def __init__(
        self, grid: Grid, rank: int, parameters: Sequence[nn.Parameter], optimizer: Optimizer, bucket_bytes: int
    ) -> None:
        bucket_numel = max(1, bucket_bytes // parameters[0].element_size()) if parameters else 1
        self.layout = plan_layout(grid, [p.numel() for p in parameters], bucket_numel)
        self.buffers = Buffers(self.layout, parameters, grid.shard_of(rank))
        self.reducer = Reducer(self.buffers, parameters)
        self.optimizer = ShardedOptimizer(optimizer, self.buffers, parameters)
        self.step = 0
        self.phase = StepPhase.IDLE
        self.committed: Commit | None = None
        self.clip = Clip()

    def connect(self, groups: Groups, check: Check) -> None:
        """Uses ``groups`` from now on."""
        self._groups, self._check = groups, check
        self.reducer.connect(groups, check)

    # A step, in the order of calls

    def before_backward(self, reduce: bool) -> None:
        """Makes ready for a backward pass; without ``reduce`` its gradients only accumulate."""
        self.buffers.attach_gradients()
        self.reducer.enabled = reduce

    def reduce(self) -> None:
        """Completes the shard's averaged gradient."""
        self.reducer.finish()

    def commit(self) -> Commit:
        """Agrees with all ranks that step t -> t+1 happens.

        Raises:
            CollectiveError: If it did not come about here. Other ranks may have seen it succeed.
        """
        vector = torch.tensor([self._own_norm_sq()], dtype=torch.float64)
        self.phase = StepPhase.ENTERED
        collectives.all_reduce(vector, self._groups, self._check)
        self.committed = Commit(*vector.tolist())
        self.phase = StepPhase.COMMITTED
        return self.committed

    def update(self) -> None:
        """Applies the committed step to the own shard. Needs no other rank."""
        if self.phase is not StepPhase.COMMITTED or self.committed is None:
            raise ProtocolError(f"An update needs a commit, but this rank is in {self.phase} of step {self.step}.")
        self.phase = StepPhase.UPDATING
        reach("update")
        if self.clip.value is not None:
            self.buffers.main_grads.clamp_(-self.clip.value, self.clip.value)
        self.optimizer.update(self._clip_coefficient(self.committed))
        self.step += 1
        self._idle()

    def gather(self) -> None:
        """Rebuilds all parameters from the shards. Collective."""
        self.buffers.params_from_main()
        works = [collectives.gather(bucket, self.buffers.params, self._groups) for bucket in self.layout.buckets]
        for index, bucket_works in enumerate(works):
            for work in bucket_works:
                wait(work, self._check)
            if index == 0:
                reach("gather")

    # After a fault (recovery.interface.Recoverable)

    @property
    def entered(self) -> bool:
        """Whether the shard's gradient of step t -> t+1 is complete, so that the update can be made without help."""
        return self.phase in (StepPhase.ENTERED, StepPhase.COMMITTED)

    @property
    def torn(self) -> bool:
        """Whether a fault came while the shard was changing."""
        return self.phase is StepPhase.UPDATING

    @property
    def commit_vector(self) -> tuple[float, ...] | None:
        """The commit of step t -> t+1, if this rank saw it succeed."""
        return self.committed.vector if self.committed is not None else None

    def roll_forward(self, vector: tuple[float, ...]) -> None:
        """Makes the update that another rank saw committed."""
        if not self.entered:
            raise ProtocolError(f"Rank in {self.phase} of step {self.step} cannot roll forward.")
        self.committed, self.phase = Commit(*vector), StepPhase.COMMITTED
        self.update()

    def roll_back(self) -> None:
        """Forgets the step under way: gradients, launches, the commit."""
        self._idle()
        self.reducer.reset()
        self.buffers.zero_gradients()

    def export_shard(self) -> tuple[dict[str, Any], list[Tensor]]:
        """The shard in few large messages.

        Returns:
            A description in plain data, and one flat tensor for the values and each kind of optimizer state.
        """
        state = self.optimizer.state()
        kinds = _by_kind(state["tensors"])
        described = {
            name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
            for name, tensor in state["tensors"].items()
        }
        manifest = {"step": self.step, "tensors": described, "scalars": state["scalars"]}
        flat = [torch.cat([tensor.reshape(-1) for tensor in tensors]) for tensors in kinds.values()]
        return manifest, [self.buffers.main, *flat]

    def import_shard(self, manifest: dict[str, Any], receive: Callable[[Tensor], None]) -> None:
        """Takes a peer's shard: ``receive`` fills one flat tensor after the other, as `export_shard` lists them."""
        self.phase = StepPhase.UPDATING  # torn until all of it is here
        shapes = {name: (getattr(torch, dtype), tuple(shape)) for name, (dtype, shape) in manifest["tensors"].items()}
        self.optimizer.prepare_state(shapes, manifest["scalars"])
        receive(self.buffers.main)
        for tensors in _by_kind(self.optimizer.state()["tensors"]).values():
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            receive(flat)
            for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
                tensor.copy_(part.view(tensor.shape))
        self.step = manifest["step"]
        self._idle()

    def rebuild(self) -> None:
        """Gathers all parameters; heals whatever a half-done gather left. Collective."""
        self.gather()

    def _idle(self) -> None:
        self.phase, self.committed, self.clip = StepPhase.IDLE, None, Clip()

    def _own_norm_sq(self) -> float:
        """This rank's share of the squared gradient norm: its own pieces, so that R holders count once."""
        total = 0.0
        for bucket in self.layout.buckets:
            where = bucket.local(self._groups.replica_index)
            total += float(torch.linalg.vector_norm(self.buffers.main_grads[where.start : where.stop])) ** 2
        return total

    def _clip_coefficient(self, commit: Commit) -> float | None:
        """As ``torch.nn.utils.clip_grad_norm_`` computes it."""
        if self.clip.norm is None:
            return None
        coefficient: float = self.clip.norm / (commit.grad_norm_sq**0.5 + 1e-6)
        return min(1.0, coefficient)


def _by_kind(tensors: dict[str, Tensor]) -> dict[tuple[str, torch.dtype], list[Tensor]]:
    """Groups ``{"<piece>/<key>": tensor}`` by key and dtype: one message a kind."""
    kinds: defaultdict[tuple[str, torch.dtype], list[Tensor]] = defaultdict(list)
    for name, tensor in tensors.items():
        kinds[name.split("/", 1)[1], tensor.dtype].append(tensor)
    return dict(kinds)
