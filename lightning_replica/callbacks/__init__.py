"""Callbacks that set up, extend, report and test recovery. May import everything but the command line.

| callback | what |
|---|---|
| RecoveryCallback | base class with a hook per phase, for a project's own state and process groups |
| JoinCallback | base class with the hooks of `uneven_inputs="join"` |
| RecoveryReport | every incident as a JSON line in a file, and as scalars in the loggers |
| StepRollback, PeerRepair, RankReplacement | the options of each level of recovery |
| DyingGaspCheckpoint | the checkpoint that survivors write when the run cannot continue |
| CheckpointPublisher | periodic checkpoints, and the tracker that names the newest |
| FaultInjector, InjectedFault, Injected | injects faults into the ranks of a training |
| Fingerprint | writes digests of what a training saw and of its results |
"""

from lightning_replica.callbacks.checkpoint_publisher import CheckpointPublisher
from lightning_replica.callbacks.dying_gasp_checkpoint import DyingGaspCheckpoint
from lightning_replica.callbacks.join_callback import JoinCallback
from lightning_replica.callbacks.peer_repair import PeerRepair
from lightning_replica.callbacks.rank_replacement import RankReplacement
from lightning_replica.callbacks.recovery_callback import RecoveryCallback
from lightning_replica.callbacks.recovery_report import RecoveryReport
from lightning_replica.callbacks.step_rollback import StepRollback
from lightning_replica.chaos.fault_injector import FaultInjector, Injected
from lightning_replica.chaos.faults import InjectedFault
from lightning_replica.chaos.fingerprint import Fingerprint

__all__ = [
    "CheckpointPublisher",
    "DyingGaspCheckpoint",
    "FaultInjector",
    "Fingerprint",
    "Injected",
    "InjectedFault",
    "JoinCallback",
    "PeerRepair",
    "RankReplacement",
    "RecoveryCallback",
    "RecoveryReport",
    "StepRollback",
]
