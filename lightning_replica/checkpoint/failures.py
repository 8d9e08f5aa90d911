"""How often in a row the runs of one directory have failed at the same step.

A batch that cannot be trained on ends a run, which saves and asks to be started again, and ends the next one in the
same way. So each run that fails writes its step to ``failures.json``, beside the checkpoints: one that fails at another
step has made progress, or has another reason, and counts from 1 again. The file is replaced as a whole. What cannot be
read in it counts as nothing: a lost count costs one more attempt.
"""

import json

from lightning_replica.checkpoint.location import Given, locate
from lightning_replica.checkpoint.storage import FAILURES, storage_of


class Failures:
    """The count of one directory.

    Args:
        path: The directory of a run's checkpoints, or its URL.
    """

    def __init__(self, path: Given) -> None:
        self.file = locate(path) / FAILURES
        self._storage = storage_of(locate(path))

    def add(self, step: int, why: str) -> int:
        """Count one more, and return how many have come in a row at this step.

        Args:
            step: At which a run has failed.
            why: For whoever reads the file.

        Raises:
            OSError: If it cannot be written; also CheckpointError.
        """
        known, count = self._read()
        count = count + 1 if known == step else 1
        content = {"step": step, "failures": count, "why": why}
        self._storage.write(FAILURES, json.dumps(content, indent=1).encode() + b"\n")
        return count

    def forget(self) -> None:
        """Begin anew: a run has come further.

        Raises:
            OSError: If that fails; also CheckpointError.
        """
        self._storage.remove(FAILURES)

    def forget_before(self, step: int) -> None:
        """Begin anew if a run has come further than to where others failed, and has ended for another reason.

        Raises:
            OSError: If that fails; also CheckpointError.
        """
        known, _ = self._read()
        if known is not None and known < step:
            self.forget()

    def _read(self) -> tuple[int | None, int]:
        """The step, and how many have failed there."""
        try:
            read = json.loads(self._storage.read(FAILURES) or b"null")
            step, count = read["step"], read["failures"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return None, 0
        known = type(step) is int and type(count) is int and count > 0
        return (step, count) if known else (None, 0)
