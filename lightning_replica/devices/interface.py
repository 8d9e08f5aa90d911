"""What recovery needs of a device: to stop, to report what survived, to restart, and to recognize its own errors."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from torch import Tensor
from torch.distributed import ProcessGroup

Level: TypeAlias = Literal["outside", "retry", "memory", "exhausted", "lost"]
"""What a device's error leaves behind.

"outside": another rank's fault stopped this one. "retry": all data is intact. "memory": `Device.clean` finds out what
was hit. "exhausted": there was too little memory. "lost": this process cannot use its device any more.
"""


@dataclass(frozen=True)
class DeviceFault:
    """A fault of the device, as read from an exception.

    Attributes:
        level: What the fault leaves behind.
        text: One line for the user.
        code: The device's own number for the fault, if the exception has one.
    """

    level: Level
    text: str
    code: int | None = None


@dataclass(frozen=True)
class Survived:
    """What a stopped device still holds.

    Attributes:
        level: "all": nothing was lost. "redo": results of the step under way are lost, but nothing that it began with.
            "rebuild": the tensors of ``hit`` are lost. "nothing": this process cannot use its device any more.
            "spoiled": moreover, the data that it has sent to other ranks may be wrong; only a checkpoint is left.
        hit: Names of the lost tensors. Each of them must be written completely before it is read again.
        links: For every group that was aborted, whether the device has connections for it that can be resumed
            (`Device.resume_groups`); empty if this kind of device can never resume any.
    """

    level: Literal["all", "redo", "rebuild", "nothing", "spoiled"]
    hit: tuple[str, ...] = ()
    links: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.hit) != (self.level == "rebuild"):
            raise ValueError(f"{self.hit=} does not fit {self.level=}: tensors are named where they are lost.")


def is_separate(device: "Device", tensor: Tensor) -> bool:
    """Return whether ``tensor`` lies in the memory of ``device``, and that memory is not the host's."""
    return not device.is_host and tensor.device.type == device.kind


class Device(Protocol):
    """One rank's device, for example `cpu.Cpu` or `cuda.Cuda`; an accelerator may bring its own (`device_for`).

    Attributes:
        kind: ``torch.device.type`` of its tensors.
        backend: The backend argument for torch.distributed, which carries tensors of the host and of the device.
        is_host: Whether its tensors lie in the host's memory. If so, ranks of one machine may map them, the host waits
            for collectives on them, and the device runs nothing that must be stopped.
        stops: Whether a recovery stops it, so that what it is computing is lost, whatever `Survived` says.
        fence: A context that the training thread holds while it writes what recovery relies on: the shard, and the
            copies to roll back to. The device is not stopped inside. Work begun inside is done when the thread leaves.
    """

    @property
    def kind(self) -> str: ...  # noqa: D102

    @property
    def backend(self) -> str: ...  # noqa: D102

    @property
    def is_host(self) -> bool: ...  # noqa: D102

    @property
    def stops(self) -> bool: ...  # noqa: D102

    @property
    def fence(self) -> AbstractContextManager[None]: ...  # noqa: D102

    def stop(self) -> None:
        """End everything that the device runs. Called from a thread other than the training thread."""

    def clean(self, held: Mapping[str, Tensor]) -> Survived:
        """Find out what survived, and make ``held`` writable again. Called in the training thread, after `stop`."""

    def restart(self) -> None:
        """Make the device usable again, with its default streams; leave it as it is if it was not stopped.

        Called in the training thread.
        """

    def abort_groups(self, groups: Sequence[ProcessGroup]) -> None:
        """Make every collective of ``groups`` fail, on this rank and on the others. Called from any thread."""

    def connect(self, group: ProcessGroup) -> Callable[[], bool]:
        """Begin to connect the members of ``group`` for tensors of the device, without waiting for them.

        Returns:
            Whether they are connected, to be called until they are. It raises a RuntimeError if they cannot be.
        """

    def resume_groups(self, groups: Sequence[ProcessGroup]) -> bool:
        """Resume the device's connections of ``groups``; the groups themselves are not used again.

        Called in the training thread, after `clean` and before `restart`, on all ranks or on none. The connections of
        aborted groups that are not in ``groups`` are given up. If this is not called, all connections are given up.

        Returns:
            Whether the connections are resumed; if not, they are given up.
        """

    def classify(self, error: BaseException) -> DeviceFault | None:
        """Return the device's fault that ``error`` reports; None if it is no fault of the device but of user code."""

    def rng_state(self) -> bytes:
        """Return the state of all random generators that this rank draws from."""

    def set_rng_state(self, state: bytes) -> None:
        """Restore what `rng_state` returned; from another kind of device's state, restore the part that both have."""
