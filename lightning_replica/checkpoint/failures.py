"""How often in a row the runs of one directory have failed at the same step.

A batch that cannot be trained on ends a run. The run saves a checkpoint and asks to be started again, and the next run
ends in the same way. So each run that fails writes its step to ``failures.json``, beside the checkpoints. A run that
fails at another step has made progress, or failed for another reason; it counts from 1 again. The file is replaced
atomically. A file that cannot be read counts as no failures: a lost count costs one more attempt.
"""

import json

from lightning_replica.checkpoint.location import Given, locate
from lightning_replica.checkpoint.storage import FAILURES
from lightning_replica.checkpoint.which_storage import storage_of


class Failures:
    """The count of failures in one directory.

    Args:
        path: The directory of a run's checkpoints, or its URL.
    """

    def __init__(self, path: Given) -> None:
        self.file = locate(path) / FAILURES
        self._directory = storage_of(locate(path))

    def add(self, step: int, why: str) -> int:
        """Count one more failure, and return how many came in a row at this step.

        Args:
            step: The step at which the run failed.
            why: The reason, for people who read the file.

        Raises:
            OSError: If the file cannot be read or written; also CheckpointError.
        """
        known, count = self._read()
        count = count + 1 if known == step else 1
        content = {"step": step, "failures": count, "why": why}
        self._directory.write(FAILURES, json.dumps(content, indent=1).encode() + b"\n")
        return count

    def forget(self) -> None:
        """Reset the count, because a run has come further.

        Raises:
            OSError: If the file cannot be removed; also CheckpointError.
        """
        self._directory.remove(FAILURES)

    def forget_before(self, step: int) -> None:
        """Reset the count if the failures were at an earlier step than ``step``, which a later run has reached.

        Called when that run ended for another reason.

        Raises:
            OSError: If the file cannot be read or removed; also CheckpointError.
        """
        known, _ = self._read()
        if known is not None and known < step:
            self.forget()

    def _read(self) -> tuple[int | None, int]:
        """Return the step, and how many runs failed there; (None, 0) if the file is missing or cannot be understood."""
        try:
            read = json.loads(self._directory.read(FAILURES) or b"null")
            step, count = read["step"], read["failures"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return None, 0
        known = type(step) is int and type(count) is int and count > 0
        return (step, count) if known else (None, 0)
