"""Parameters that no optimizer trains but user code writes to, such as a teacher or a momentum encoder.

No shard holds them, so a rank that goes back to a snapshot has to restore them itself. Most never change (a frozen
backbone, a model to which adapters are added), and they may be large; `contents` says what is compared and copied. If a
parameter that has no copy turns out to have changed since the snapshot, the run ends with an error, because it would
not be exact.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import nn

from lightning_replica.core.inexact import Report
from lightning_replica.errors import RecoveryError
from lightning_replica.state.objects.contents import Contents, Copy, Held, is_content

FrozenValues: TypeAlias = list[tuple[Held, Copy]]
"""Parameters, each with what it held; None for those that are large and have not been seen to change."""


class FrozenCopies:
    """Copies of parameters that no shard holds, kept from one snapshot to the next.

    Args:
        trained: Returns the parameters that shards hold.
        report: Called with a write that is found late.
    """

    def __init__(self, trained: Callable[[], Sequence[nn.Parameter]], report: Report) -> None:
        self._trained = trained
        self._contents = Contents(report)

    def take(self, parameters: dict[str, nn.Parameter], window: bool, whole: bool = False) -> FrozenValues:
        """Return copies of the parameters that change.

        Args:
            parameters: All parameters of the module, by name.
            window: Whether a window of batches begins.
            whole: Whether everything is compared, whatever its size.
        """
        trained = {id(parameter) for parameter in self._trained()} if parameters else set()
        found = {name: each for name, each in parameters.items() if id(each) not in trained and is_content(each)}
        values = [self._contents.add(each, f"module.{name}") for name, each in found.items()]
        self._contents.keep(map(id, found.values()))
        self._contents.refresh(window, whole)
        return [(each, each.copy) for each in values]

    def put_back(self, values: FrozenValues) -> None:
        """Restore the values that `take` has copied.

        Raises:
            RecoveryError: If a parameter that was not copied has changed since.
        """
        lost = [held for held, copy in values if copy is None and held.look()]
        if lost:
            raise RecoveryError(
                f"{lost[0].name}, one of {len(lost)} parameters of which that is so, is trained by no optimizer. It has"
                " been written to for the first time since the step began, and its former content is lost. Write to it"
                " from the first step on, or keep it in a buffer."
            )
        for held, copy in values:
            if copy is not None:
                held.put_back(copy)
