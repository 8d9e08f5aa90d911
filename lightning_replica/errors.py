"""Every exception that the package raises.

ReplicaError
├── ConfigurationError       what was asked for cannot be done; raised before any process group waits
├── VersionError             the installed version of torch or Lightning has no place for what the package does in it
├── CollectiveError          a collective of this rank did not finish: a peer is gone or the group was aborted
├── ClosedGroupError         a process group was used that no recovery could open again
├── Interrupted              the world has moved to a new generation; this rank's step ends here
├── CorruptedShardError      bits of this rank's shard have changed by themselves, or its peers have others
├── TransferError            a shard or a snapshot arrived damaged or not at all
├── HookError                a recovery hook of the user's raised; recovery is tried again
├── CheckpointError          a checkpoint is damaged, unfinished, of another model, or could not be written
├── UncollectedStateError    the whole state of a `ReplicaOptimizer` was asked of a rank that has not collected it
├── WorkerDiedError          a worker of a DataLoader has died; its loader begins again where the batch was to come
├── DeviceLostError          this process cannot use its device any more; it ends, and is replaced
├── ProtocolError            ranks report what the commit rule rules out: a bug here, never a fault of the machine
└── RecoveryError            the run cannot go on; the message says why and what was lost
"""


class ReplicaError(Exception):
    """Root of the package's exceptions."""


class ConfigurationError(ReplicaError, ValueError):
    """What was asked for cannot be done. The message says what, what was given and what to do."""


class VersionError(ReplicaError, ImportError):
    """The installed version of torch or Lightning lacks a private name that the package uses. Raised at import."""


class CollectiveError(ReplicaError):
    """A collective did not finish: a peer is gone or the process group was aborted."""


class ClosedGroupError(ReplicaError):
    """A process group was used that a recovery could not open again, as not every member has it."""


class Interrupted(ReplicaError):
    """Another rank is lost and the world moves to a new generation."""


class CorruptedShardError(ReplicaError):
    """This rank's shard cannot be trusted: it changed at rest, or its peers hold other bits."""


class TransferError(ReplicaError):
    """A shard or a snapshot arrived damaged or not at all."""


class HookError(ReplicaError):
    """A recovery hook of the user's raised. Counts as a failed recovery."""


class CheckpointError(ReplicaError):
    """A checkpoint is damaged, unfinished, of another model, or could not be written. The message names file and cause.

    Not a ``ValueError``: what was asked for is fine, what lies on the disk is not.
    """


class UncollectedStateError(ReplicaError, RuntimeError):
    """This rank has not collected the whole state. A ``RuntimeError``, as that of torch's `ZeroRedundancyOptimizer`."""


class WorkerDiedError(ReplicaError, RuntimeError):
    """A worker of a DataLoader has died. A ``RuntimeError``, as torch's own."""


class DeviceLostError(ReplicaError):
    """This process cannot use its device any more."""


class ProtocolError(ReplicaError):
    """Reports contradict the commit rule. Always a bug in this package."""


class RecoveryError(ReplicaError):
    """The run cannot go on."""
