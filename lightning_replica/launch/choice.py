"""Who starts the ranks: our supervisor, or another launcher."""

import sys
from collections.abc import Callable
from typing import Any, cast

from lightning_replica._compat.lightning_names import ClusterEnvironment, LightningEnvironment, _Launcher
from lightning_replica.core.options import RecoveryOptions
from lightning_replica.errors import ConfigurationError
from lightning_replica.launch.arguments import FillIn
from lightning_replica.launch.environment import RankContext, RankEnvironment, ranks_running
from lightning_replica.launch.external import ExternalEnvironment, ExternalLauncher, started_by_another
from lightning_replica.launch.launcher import RankLauncher, supervise
from lightning_replica.launch.refusal import (
    RefusingLauncher,
    called_by_tests,
    refuse_children,
    refuse_grandchildren,
    refuse_threads,
)


def launcher_for(
    cluster: ClusterEnvironment | None,
    num_processes: int,
    num_nodes: int,
    options: RecoveryOptions,
    options_for: Callable[[Any], RecoveryOptions],
    fill_in: FillIn,
    hand_over: Callable[[], dict[str, str]],
) -> _Launcher:
    """Return the launcher of this process, or make this process the supervisor.

    The process that the user has started becomes the supervisor. The function does not return there.

    Args:
        cluster: The cluster environment that Lightning has found.
        num_processes: Number of ranks on this node.
        num_nodes: Number of nodes.
        options: What the strategy's arguments say about recovery.
        options_for: Returns what the user of a trainer has chosen about recovery.
        fill_in: Completes the arguments of the launched function.
        hand_over: Called before this process becomes the supervisor; returns the notes that ranks find in its store.

    Raises:
        ConfigurationError: Where running the script again would start no ranks: in an interactive session, in a thread,
            in a process that the script has started.
        SystemExit: In the supervisor, once all ranks have ended, with their exit code.
    """
    environment = RankEnvironment.current()
    refuse_threads()
    if environment is not None:
        refuse_grandchildren(environment)
        return RankLauncher(environment, num_processes, options_for, fill_in)
    if hasattr(sys, "ps1"):
        raise ConfigurationError(
            "`replica_zero` starts and replaces its ranks by running the script again; an interactive session or a"
            " notebook has no script. Save the code to a file and run it with `python train.py`; in a notebook,"
            " `!python train.py`."
        )
    if cluster is not None and started_by_another(cluster):
        return ExternalLauncher(cluster, num_processes, num_nodes, fill_in)
    runner = called_by_tests()
    if runner:
        return RefusingLauncher(runner)
    refuse_children()
    return supervise(num_processes, options, hand_over())


def check_devices(world_size: int) -> None:
    """Check that a trainer asks for as many ranks as this script runs with. All ranks come to the same result.

    Args:
        world_size: Number of ranks that the trainer asks for, on all nodes.

    Raises:
        ConfigurationError: If supervisors have started another number of ranks, for the script's first trainer.
    """
    running = ranks_running()
    if running in ("", str(world_size)):
        return
    raise ConfigurationError(
        f"This trainer asks for {world_size} rank{'s' if world_size > 1 else ''}, but this script runs with"
        f" {running}, because its first trainer with `replica_zero` asked for that. Use the same `devices` in all of"
        " them. A trainer that only predicts or tests on one device needs no replicas: `Trainer(devices=1,"
        ' strategy="auto")`.'
    )


def environment_of_rank() -> ClusterEnvironment | None:
    """Return the cluster environment of a rank that a supervisor has started; None for Lightning to find it.

    Lightning would find the scheduler that has started the supervisor, whose variables say nothing about ranks.
    """
    return None if RankEnvironment.current() is None else LightningEnvironment()


def is_rank(cluster: ClusterEnvironment | None) -> bool:
    """Return whether this process is a rank; if not, the user has started it, and it becomes the supervisor."""
    return RankEnvironment.current() is not None or started_by_another(cluster)


def rank_context(cluster: ClusterEnvironment | None, rank: int, num_nodes: int) -> RankContext:
    """Return how this rank reaches the other ranks. A process enters the store of another launcher only once."""
    global _entered
    environment = RankEnvironment.current()
    if environment is not None or cluster is None:
        return cast("RankEnvironment", environment)
    if _entered is None:
        _entered = ExternalEnvironment.enter(cluster, rank, num_nodes)
    return _entered


_entered: ExternalEnvironment | None = None
