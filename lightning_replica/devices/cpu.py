"""The CPU as a device: its tensors lie in the host's memory, and it runs nothing that must be stopped."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_replica.devices import gloo, host
from lightning_replica.devices.interface import DeviceFault, Survived


class Cpu:
    """`Device` for ranks that train on the CPU, over gloo."""

    kind = host.HOST.type
    backend = gloo.NAME
    is_host, stops = True, False
    fence = nullcontext()

    def stop(self) -> None:
        """Do nothing: only this rank's own threads run."""

    def clean(self, held: Mapping[str, Tensor]) -> Survived:
        """Report that everything survived: nothing is lost while the process lives."""
        return Survived("all")

    def restart(self) -> None:
        """Do nothing: nothing was stopped."""

    def abort_groups(self, groups: Sequence[ProcessGroup]) -> None:
        """Abort ``groups`` with `gloo.abort_group`."""
        for group in groups:
            gloo.abort_group(group)

    def connect(self, group: ProcessGroup) -> Callable[[], bool]:
        """Do nothing: gloo has connected when a group is made."""
        return lambda: True

    def resume_groups(self, groups: Sequence[ProcessGroup]) -> bool:
        """Return False: an abort closes the connections for good."""
        return False

    def classify(self, error: BaseException) -> DeviceFault | None:
        """Return an "outside" fault for a failed collective; a CPU reports no faults of its own."""
        return DeviceFault("outside", str(error)) if gloo.is_collective_failure(error) else None

    def rng_state(self) -> bytes:
        """Return the state of the host's generators."""
        return host.rng_state()

    def set_rng_state(self, state: bytes) -> None:
        """Restore what `rng_state` returned."""
        host.set_rng_state(state)
