"""Kills a rank from outside, at a moment that a seed chooses."""

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.wild.outcome import Outcome, progress

_LAST = 4  # lines of a fit after which it may be over before the signal has arrived


@dataclass(frozen=True)
class Kill:
    """SIGKILL for a rank ``after_s`` after it has written line ``line`` of its progress, or at the next line if sooner.

    Both come from an untouched run: moments are spread evenly over its time between the second batch and the last lines
    of each fit. Lines and not seconds are waited for, so that a slower machine does not move the kill out of the fit.
    """

    rank: int
    line: int
    after_s: float

    @classmethod
    def choose(cls, untouched: Outcome, rank: int, seed: str) -> "Kill":
        """Chooses the moment."""
        lines = untouched.progress[rank]
        spans = [
            (number, lines[number + 1].time_s - line.time_s)
            for number, line in enumerate(lines[:-_LAST])
            if number and lines[number - 1].fit == line.fit == lines[number + _LAST].fit
        ]
        at = random.Random(seed).uniform(0, sum(span for _, span in spans))
        while len(spans) > 1 and at > spans[0][1]:
            at -= spans.pop(0)[1]
        return cls(rank, spans[0][0], at)

    def carry_out(self, out: Path, ended: Callable[[], bool]) -> bool:
        """Waits for the moment and kills; returns whether the run lasted until then."""
        path = out / f"progress{self.rank}"
        while len(lines := progress(path)) <= self.line:
            if ended():
                return False
            time.sleep(0.001)
        while time.monotonic() < lines[self.line].time_s + self.after_s and len(progress(path)) <= self.line + 1:
            time.sleep(0.0002)
        os.kill(lines[self.line].pid, signal.SIGKILL)
        return True
