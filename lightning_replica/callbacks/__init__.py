"""Callbacks that set recovery up, extend it, tell of it and try it.

| callback | what |
|---|---|
| RecoveryCallback | base class with a hook per phase, for a project's own state and process groups |
| RecoveryReport | every incident as a JSON line in a file, and as scalars in the loggers |
| StepRollback, PeerRepair, RankReplacement | the options of each level of recovery |
| DyingGaspCheckpoint | what is left of a run that cannot go on |
| CheckpointPublisher | periodic checkpoints, and the tracker that names the newest |
| FaultInjector, InjectedFault, Injected | lets ranks of a training fail |
| Fingerprint | writes down digests of all that a training comes to |
"""

from lightning_replica.callbacks.checkpoint_publisher import CheckpointPublisher
from lightning_replica.callbacks.dying_gasp_checkpoint import DyingGaspCheckpoint
from lightning_replica.callbacks.fault_injector import FaultInjector, Injected
from lightning_replica.callbacks.faults import InjectedFault
from lightning_replica.callbacks.fingerprint import Fingerprint
from lightning_replica.callbacks.peer_repair import PeerRepair
from lightning_replica.callbacks.rank_replacement import RankReplacement
from lightning_replica.callbacks.recovery_callback import RecoveryCallback
from lightning_replica.callbacks.recovery_report import RecoveryReport
from lightning_replica.callbacks.step_rollback import StepRollback

__all__ = [
    "CheckpointPublisher",
    "DyingGaspCheckpoint",
    "FaultInjector",
    "Fingerprint",
    "Injected",
    "InjectedFault",
    "PeerRepair",
    "RankReplacement",
    "RecoveryCallback",
    "RecoveryReport",
    "StepRollback",
]
