"""Whether a batch that is done again after a fault gives the bits of its first attempt.

A recovery restores what it knows of. State that it does not know of (a global of the script, memory of an extension,
the time of day) shows here, if it matters at all: the losses of the step differ, or its gradient does. So each
recovery that does a batch again checks itself. A replacement has no first attempt, and its peers have.
"""

from torch import Tensor

from lightning_replica.core.inexact import Report
from lightning_replica.sharding.engine import Engine
from lightning_replica.state.objects.contents import plain_of, same_content

_CAUSES = "something that is not restored affects it, or a kernel that is not deterministic"


class RepeatedStep:
    """Compares a step with its first attempt, which a fault has ended.

    Args:
        state: The sharded state, which compares gradients.
        rank: This rank.
        report: Called with what differs.
    """

    def __init__(self, state: Engine, rank: int, report: Report) -> None:
        self._state, self._rank, self._report = state, rank, report
        self._step, self._losses = 0, list[Tensor]()
        self._first: tuple[int, list[Tensor]] | None = None

    def begin(self) -> None:
        """Begin an attempt: a window of batches."""
        self._step, self._losses = self._state.step, []

    def add(self, loss: Tensor) -> None:
        """Note a loss that is propagated back."""
        self._losses.append(plain_of(loss))

    def interrupted(self) -> None:
        """Keep what the attempt has computed, because a fault has ended it. A step's first attempt counts."""
        step = self._state.step
        if self._step == step and (self._first is None or self._first[0] != step):
            self._first = step, self._losses
        self._losses = []

    def forget(self) -> None:
        """Compare nothing with the attempt that was interrupted."""
        self._first = None

    def compare(self) -> None:
        """Report what differs from the first attempt, if there was one. Called before the commit."""
        first, self._first = self._first, None
        lost, same_gradient = self._state.results_lost, self._state.repeats_gradient()
        if first is None or first[0] != self._state.step or lost:
            return
        where = f"step {first[0] + 1} on rank {self._rank}"
        for before, now in zip(first[1], self._losses, strict=False):
            if not same_content(before, now):
                self._report(
                    f"the loss of {where}",
                    f"it was {_number(before)}, and {_number(now)} when the batch was done again: {_CAUSES}",
                    "once",
                )
                return
        if not same_gradient:
            self._report(f"the gradient of {where}", f"it was another when the batch was done again: {_CAUSES}", "once")


def _number(loss: Tensor) -> str:
    return repr(loss.item()) if loss.numel() == 1 else f"a tensor of shape {tuple(loss.shape)}"
