"""What recovery asks of a device: to stop, to say what survived, to go on, and to tell its own errors from others."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from torch import Tensor
from torch.distributed import ProcessGroup

Level: TypeAlias = Literal["outside", "retry", "memory", "exhausted", "lost"]
"""What a device's error leaves behind.

"outside": another rank's fault stopped this one. "retry": all that was there is intact. "memory": `Device.clean` knows
what was hit. "exhausted": there was too little memory. "lost": this process cannot use its device any more.
"""


@dataclass(frozen=True)
class DeviceFault:
    """What an exception says of the device.

    Attributes:
        level: What it leaves behind.
        text: One line for the user.
        code: The device's own number for it, if it gave one.
    """

    level: Level
    text: str
    code: int | None = None


@dataclass(frozen=True)
class Survived:
    """What a stopped device still holds.

    Attributes:
        level: "all": nothing was lost. "redo": what the step under way had made is lost, nothing that it began with.
            "rebuild": the tensors of ``hit`` are lost. "nothing": this process cannot use its device any more.
            "spoiled": nor can anybody be sure of what it has given to others; only a checkpoint is left.
        hit: Names of tensors that must be written to, all of them, before they are read again.
        links: For every group that was aborted, whether the device has connections for it that can go on
            (`Device.resume_groups`); empty where none ever can.
    """

    level: Literal["all", "redo", "rebuild", "nothing", "spoiled"]
    hit: tuple[str, ...] = ()
    links: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.hit) != (self.level == "rebuild"):
            raise ValueError(f"{self.hit=} does not go with {self.level=}: tensors are named where they are lost.")


def is_apart(device: "Device", tensor: Tensor) -> bool:
    """Whether ``tensor`` lies in the memory of ``device``, and that is not the host's."""
    return not device.is_host and tensor.device.type == device.kind


class Device(Protocol):
    """One rank's device. `cpu.Cpu` and `cuda.Cuda` are some; an accelerator may bring its own (`device_for`).

    Attributes:
        kind: ``torch.device.type`` of its tensors.
        backend: For torch.distributed: what carries tensors of the host and of the device.
        is_host: Whether its tensors lie in the host's memory: ranks of one machine may map them, collectives on them
            are waited for on the host, and nothing is under way that would have to be stopped.
        fence: Held by the thread that trains while it makes what recovery relies on: the shard, and copies for going
            back. The device is not stopped inside, and what was begun inside is done when it is left.
    """

    @property
    def kind(self) -> str: ...  # noqa: D102

    @property
    def backend(self) -> str: ...  # noqa: D102

    @property
    def is_host(self) -> bool: ...  # noqa: D102

    @property
    def fence(self) -> AbstractContextManager[None]: ...  # noqa: D102

    def stop(self) -> None:
        """Ends whatever the device runs. Called from another thread than the one that trains."""

    def clean(self, held: Mapping[str, Tensor]) -> Survived:
        """Finds out what survived, and makes ``held`` writable again. In the training thread, after `stop`."""

    def restart(self) -> None:
        """Makes the device usable again, with its default streams; one that was not stopped is left as it is.

        In the training thread.
        """

    def abort_groups(self, groups: Sequence[ProcessGroup]) -> None:
        """Fails every collective of ``groups`` on this rank, and tells the peers. From any thread."""

    def resume_groups(self, groups: Sequence[ProcessGroup]) -> bool:
        """Has the device's connections of ``groups`` go on; what is left of the groups themselves is not used again.

        In the training thread, after `clean` and before `restart`, on all ranks or on none. What was aborted beside
        ``groups`` is given up, and so is everything where this is not called.

        Returns:
            Whether they can; if not, they are given up.
        """

    def classify(self, error: BaseException) -> DeviceFault | None:
        """What ``error`` says of the device; None if it is not the device's but, say, the user's own."""

    def rng_state(self) -> bytes:
        """State of all generators that this rank draws from."""

    def set_rng_state(self, state: bytes) -> None:
        """The inverse of `rng_state`. Of another kind of device's state, takes what both have."""
