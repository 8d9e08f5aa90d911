"""The engine: all that trainer, recovery and checkpoint may use of the sharded state.

An engine holds one rank's part of parameters, gradients and optimizers, and makes the step. `state.ShardedState` is the
engine of this package (ZeRO-1 with R holders of each shard). Another engine would be a folder beside `sharding` that
has a class with the methods of `roles.Engine`. Code outside of `sharding` uses nothing else of
that folder (tests/test_house.py).

[Note: the order of calls]
A step, on every rank:

    begin_window                       the first batch of the step is about to begin
      before_backward                  before each backward pass, of which there may be several
      after_backward                   after it
      unscale, clip                    where gradients are whole: the user's hooks see the result
    reduce                             the shard's averaged gradient is complete
    digest                             before the mirrors are sent
    part_of_commit, compare, commit    from here on the step may have happened on another rank
    update                             from here on it has happened here; needs no other rank
    gather                             collective

Under manual optimization `step_one` replaces the calls from reduce to gather, any number of times. `end_batch` follows
the last of them, and then the commit of the batch. `release` is the last call of all. A fault may come in any call.
Then the calls of `core.recoverable.Recoverable` follow, and after them `begin_window`, or the tail of the step.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.optim import Optimizer

from lightning_replica.core.grid import Grid
from lightning_replica.core.inexact import Report, warn
from lightning_replica.sharding.buffers import OF_PARAMETERS
from lightning_replica.sharding.carried import CARRIED_BYTES
from lightning_replica.sharding.commit import Commit, Flags, Request
from lightning_replica.sharding.layout import Partition
from lightning_replica.sharding.optimizer import ELEMENT_WISE
from lightning_replica.sharding.own_attributes import Watch, watch_of
from lightning_replica.sharding.roles import Checkpointable, Engine, HeldPiece, OptimizerShard
from lightning_replica.sharding.settings import REDUCE_DTYPES, EngineSettings, ReduceDtype
from lightning_replica.sharding.state import ShardedState
from lightning_replica.sharding.whole import WholeOptimizer

__all__ = [
    "CARRIED_BYTES",
    "ELEMENT_WISE",
    "OF_PARAMETERS",
    "REDUCE_DTYPES",
    "Checkpointable",
    "Commit",
    "Engine",
    "EngineSettings",
    "Flags",
    "HeldPiece",
    "OptimizerShard",
    "Partition",
    "ReduceDtype",
    "Request",
    "WholeOptimizer",
    "Watch",
    "make_engine",
    "watch_of",
]


def make_engine(
    grids: Sequence[Grid],
    rank: int,
    parameters: Sequence[nn.Parameter],
    optimizers: Sequence[Optimizer],
    settings: EngineSettings,
    fence: AbstractContextManager[None] = nullcontext(),  # noqa: B008
    report: Report = warn,
) -> Engine:
    """Lay parameters out and shard optimizers. Needs no other rank.

    Args:
        grids: The grids that the rank is in; the second, if there is one, shards experts.
        rank: This rank.
        parameters: All parameters of the module, in registration order.
        optimizers: The user's optimizers.
        settings: How the state is sharded.
        fence: A context that is held while the shard, or a copy of it, is written: see `devices.interface.Device`.
        report: Called with what is not restored exactly.

    Raises:
        ConfigurationError: If there is nothing to train, or an optimizer cannot be sharded.
    """
    return ShardedState(grids, rank, parameters, optimizers, settings, fence, report)
