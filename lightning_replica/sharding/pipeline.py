"""The buckets of one step on their way through the stages of a reduction."""

from collections.abc import Sequence

import torch.distributed as dist

from lightning_replica.core.pending_work import Check, Ordered, wait
from lightning_replica.core.points import reach
from lightning_replica.sharding.levels import IN_FLIGHT, Job, Stage


class Pipeline:
    """Takes buckets through all stages, each as far as it comes without waiting, until `finish` waits.

    In every stage, buckets come in the same order on all ranks.

    Args:
        jobs: The buckets, in order.
        stages: The stages, in order.
        check: Raises when waiting has become pointless.
    """

    def __init__(self, jobs: Sequence[Job], stages: Sequence[Stage], check: Check) -> None:
        self.jobs = jobs
        self._stages, self._check = stages, check
        self._begun, self._ended = [0] * len(stages), [0] * len(stages)
        self._finishes = False

    def advance(self) -> None:
        """Begin and end all that can be begun and ended without waiting."""
        while any(self._advance(number) for number in reversed(range(len(self._stages)))):
            pass

    def finish(self) -> None:
        """Take all buckets through all stages. Buckets that backward did not complete are sent as they are.

        Raises:
            CollectiveError: If a peer is gone.
        """
        self._finishes = True
        self.advance()
        while self._ended[-1] < len(self.jobs):
            farthest = max(number for number in range(len(self._stages)) if self._ended[number] < self._begun[number])
            self._end(farthest)
            self.advance()

    def _advance(self, number: int) -> bool:
        """Advance one stage; return whether anything has moved."""
        before = self._begun[number], self._ended[number]
        while self._can_end(number):
            self._end(number)
        while self._can_begin(number):
            self._begin(number)
        return before != (self._begun[number], self._ended[number])

    def _can_begin(self, number: int) -> bool:
        is_last = number == len(self._stages) - 1
        return (is_last or not self._is_full(number)) and self._is_next_ready(number)

    def _is_full(self, number: int) -> bool:
        return self._begun[number] - self._ended[number] == IN_FLIGHT

    def _is_next_ready(self, number: int) -> bool:
        """Return whether there is a next bucket for a stage that could begin if there is room."""
        begun = self._begun[number]
        if number > 0:
            return begun < self._ended[number - 1]
        return begun < len(self.jobs) and (self._finishes or self.jobs[begun].missing <= 0)

    def _can_end(self, number: int) -> bool:
        """Return whether the next bucket can leave a stage. Nothing follows the last stage, so it is left in `finish`.

        Otherwise, a device would do the rest of backward only after it.
        """
        ended, is_last = self._ended[number], number == len(self._stages) - 1
        if ended == self._begun[number] or (is_last and not self._finishes):
            return False
        pending = self.jobs[ended].pending
        return all(self._is_due(number) if isinstance(work, Ordered) else _is_done(work) for work in pending)

    def _is_due(self, number: int) -> bool:
        """Return whether the first bucket of a stage on a device should be waited for.

        The rest of backward comes only afterwards. So a bucket stays until the next one needs its room: by then, most
        of its collective has run beside backward. When all buckets have been sent, there is nothing left to wait for.

        Time decides nothing here, so collectives of different groups begin in the same order on all ranks. Otherwise,
        those of NCCL could wait for each other.
        """
        return self._begun[0] == len(self.jobs) or (self._is_full(number) and self._is_next_ready(number))

    def _begin(self, number: int) -> None:
        job = self.jobs[self._begun[number]]
        if number == 0:
            job.begun = True
            job.buffers.complete(job.bucket)
        self._stages[number].begin(job)
        self._begun[number] += 1

    def _end(self, number: int) -> None:
        job = self.jobs[self._ended[number]]
        backward_follows = not self._finishes and self._begun[0] < len(self.jobs)
        for work in job.pending:
            if isinstance(work, Ordered) and backward_follows:
                work.await_end(self._check)
            wait(work, self._check)
        self._stages[number].end(job)
        self._ended[number] += 1
        if self._ended[number] == 1 and number == len(self._stages) - 2:
            reach("reduction")


def _is_done(work: "dist.Work | None") -> bool:
    return work is None or work.is_completed()
