"""Who starts the ranks: the supervisor, or somebody else."""

import sys
from collections.abc import Callable
from typing import Any, cast

from lightning.pytorch.plugins import ClusterEnvironment

from lightning_replica._compat.lightning import _Launcher
from lightning_replica.errors import ConfigurationError
from lightning_replica.launch.arguments import FillIn
from lightning_replica.launch.environment import RankEnvironment, Surroundings, ranks_running
from lightning_replica.launch.external import ExternalEnvironment, ExternalLauncher, started_by_another
from lightning_replica.launch.launcher import RankLauncher, supervise
from lightning_replica.launch.refusal import RefusingLauncher, called_by_tests
from lightning_replica.recovery.options import RecoveryOptions


def launcher_for(
    cluster: ClusterEnvironment | None,
    num_processes: int,
    num_nodes: int,
    options: RecoveryOptions,
    options_for: Callable[[Any], RecoveryOptions],
    fill_in: FillIn,
    hand_over: Callable[[], dict[str, str]],
) -> _Launcher:
    """The launcher of this process. The one that the user has started does not come back: it is the supervisor.

    Args:
        cluster: What Lightning has found.
        num_processes: Ranks on this node.
        num_nodes: Nodes.
        options: What the strategy's arguments say about recovery.
        options_for: What a trainer's user has chosen about recovery.
        fill_in: Completes the arguments of what is launched.
        hand_over: Called before this process becomes the supervisor; gives what the ranks shall find in its store.

    Raises:
        ConfigurationError: In a session without a script.
        SystemExit: In the supervisor, once all ranks have ended, with their exit code.
    """
    environment = RankEnvironment.current()
    if environment is not None:
        return RankLauncher(environment, num_processes, options_for, fill_in)
    if hasattr(sys, "ps1"):
        raise ConfigurationError(
            "`replica_zero` starts its ranks by running the script again, and replaces them so; an interactive session"
            " or a notebook has no script. Save the code to a file and run it with `python train.py`; in a notebook,"
            " `!python train.py`."
        )
    if cluster is not None and started_by_another(cluster):
        return ExternalLauncher(cluster, num_processes, num_nodes, fill_in)
    runner = called_by_tests()
    if runner:
        return RefusingLauncher(runner)
    return supervise(num_processes, options, hand_over())


def check_devices(num_processes: int) -> None:
    """Make sure that a trainer asks for the ranks that this script runs with, on every rank alike.

    Args:
        num_processes: What it asks for.

    Raises:
        ConfigurationError: If the supervisor has started another number of ranks, for the script's first trainer.
    """
    running = ranks_running()
    if running in ("", str(num_processes)):
        return
    raise ConfigurationError(
        f"This trainer asks for {num_processes} rank{'s' if num_processes > 1 else ''}, but this script runs with"
        f" {running}, as its first trainer with `replica_zero` has asked for. Use the same `devices` in all of them. A"
        " trainer that only predicts or tests, and on one device, needs no replicas: `Trainer(devices=1,"
        ' strategy="auto")`.'
    )


def is_rank(cluster: ClusterEnvironment | None) -> bool:
    """Whether this process is a rank; otherwise it is the one that the user started, and will be the supervisor."""
    return RankEnvironment.current() is not None or started_by_another(cluster)


def surroundings(cluster: ClusterEnvironment | None, rank: int, num_nodes: int) -> Surroundings:
    """How a rank reaches the others; another launcher's store is entered once."""
    global _entered
    environment = RankEnvironment.current()
    if environment is not None or cluster is None:
        return cast("RankEnvironment", environment)
    if _entered is None:
        _entered = ExternalEnvironment.enter(cluster, rank, num_nodes)
    return _entered


_entered: ExternalEnvironment | None = None
