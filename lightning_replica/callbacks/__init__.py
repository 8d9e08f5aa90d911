"""Callbacks that set recovery up, extend it and tell of it.

| callback | what |
|---|---|
| RecoveryCallback | base class with a hook per phase, for a project's own state and process groups |
| RecoveryReport | every incident as a JSON line in a file, and as scalars in the loggers |
| StepRollback, PeerRepair, RankReplacement | the options of each level of recovery |
"""

from lightning_replica.callbacks.peer_repair import PeerRepair
from lightning_replica.callbacks.rank_replacement import RankReplacement
from lightning_replica.callbacks.recovery_callback import RecoveryCallback
from lightning_replica.callbacks.recovery_report import RecoveryReport
from lightning_replica.callbacks.step_rollback import StepRollback

__all__ = ["PeerRepair", "RankReplacement", "RecoveryCallback", "RecoveryReport", "StepRollback"]
