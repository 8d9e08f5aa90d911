"""Whether gradients that lie in buffers when a batch begins are needed: a later step may add to them."""

from collections.abc import Sequence
from typing import Final

CARRIED_BYTES: Final = 2**26  # gradients that take more are in no checkpoint
_SURE: Final = 8  # batches that have removed such gradients first, until they count as never needed


class Carried:
    """Watches the gradients of some buffers under manual optimization.

    Most training steps remove gradients before they compute new ones. Some add to them for several batches, and in
    others gradients of one loss are left in the parameters of another, which removes them.

    Args:
        nbytes: The size of the gradients in bytes.
    """

    def __init__(self, nbytes: int) -> None:
        self._sure = _SURE if nbytes <= CARRIED_BYTES else 1
        self._old: list[bool] = []  # by parameter: whether a gradient of an earlier batch lies there
        self.is_used = False
        self._removed_first = 0

    @property
    def may_be_needed(self) -> bool:
        """Whether a step may use gradients that lie there before its batch."""
        return self.is_used or self._removed_first < self._sure

    def begin_window(self, present: Sequence[bool]) -> None:
        """Note which parameters have a gradient when a batch begins."""
        self._old = [*present]

    def before_backward(self, present: Sequence[bool]) -> None:
        """Note which parameters still have a gradient: one that was removed is new after the pass."""
        if any(self._old):
            self._old = [was and now for was, now in zip(self._old, present, strict=True)]
            self._removed_first += not any(self._old)

    def step(self, present: Sequence[bool]) -> None:
        """Note that an update has used the gradients."""
        self.is_used |= any(was and now for was, now in zip(self._old, present, strict=False))
