"""The CPU: its tensors are the host's, and nothing runs that would have to be stopped."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_replica.devices import gloo, host
from lightning_replica.devices.interface import DeviceFault, Survived


class Cpu:
    """`Device` for ranks that train on the CPU, over gloo."""

    kind = host.HOST.type
    backend = gloo.NAME
    is_host = True
    fence = nullcontext()

    def stop(self) -> None:
        """Nothing runs but this rank's own threads."""

    def clean(self, held: Mapping[str, Tensor]) -> Survived:
        """Nothing is lost while the process lives."""
        return Survived("all")

    def restart(self) -> None:
        """Nothing was stopped."""

    def abort_groups(self, groups: Sequence[ProcessGroup]) -> None:
        """See `gloo.abort_group`."""
        for group in groups:
            gloo.abort_group(group)

    def resume_groups(self, groups: Sequence[ProcessGroup]) -> bool:
        """An abort has closed the connections."""
        return False

    def classify(self, error: BaseException) -> DeviceFault | None:
        """A failed collective is all that a CPU has to say."""
        return DeviceFault("outside", str(error)) if gloo.is_collective_failure(error) else None

    def rng_state(self) -> bytes:
        """The host's generators."""
        return host.rng_state()

    def set_rng_state(self, state: bytes) -> None:
        """The inverse of `rng_state`."""
        host.set_rng_state(state)
