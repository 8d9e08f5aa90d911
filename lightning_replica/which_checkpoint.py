"""Which checkpoint a run goes on from when it is told "last" or "auto": the newest whole one.

Chosen once for each fit, by rank 0 for all ranks; a replacement must not find a newer one.

Every byte of what is chosen has been read and compared with its checksum: a damaged one would end this run, and then be
chosen by the next.
"""

import inspect
import logging
import os
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias

from lightning_replica.checkpoint.directory import CheckpointDirectory, newest
from lightning_replica.errors import CheckpointError, ConfigurationError
from lightning_replica.messages import say

log = logging.getLogger(__name__)

Resume: TypeAlias = Literal["auto"] | None


class WhichCheckpoint:
    """Fills in ``ckpt_path`` where the user has left the choice to us.

    Args:
        resume: "auto" goes on from the newest checkpoint in a fit that is given none; None begins anew.
        once: Calls a function on one rank, and gives all ranks its result.
    """

    def __init__(self, resume: Resume, once: Callable[[Callable[[], str]], str]) -> None:
        self._resume, self._once = resume, once

    def fill_in(
        self, trainer: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> inspect.BoundArguments:
        """The arguments of ``Trainer.fit`` and its like, with the checkpoint's path in place of "last" or nothing.

        Raises:
            ConfigurationError: If that cannot be told, or no callback says where checkpoints are.
        """
        bound = inspect.signature(function).bind(*args, **kwargs)
        asked = bound.arguments.get("ckpt_path")
        if trainer is None or "ckpt_path" not in bound.signature.parameters or not self._is_ours(asked, function):
            return bound
        directories = list(_directories(trainer.callbacks))
        if not directories and asked is None:
            raise ConfigurationError(
                "resume='auto' goes on from the newest checkpoint, but no callback says where those are. Add"
                " DyingGaspCheckpoint(dirpath) or CheckpointPublisher(dirpath), or leave `resume` out."
            )
        found = self._once(lambda: self._newest(directories))
        if found:
            bound.arguments["ckpt_path"] = found
        return bound

    def _is_ours(self, asked: object, function: Callable[..., Any]) -> bool:
        auto = self._resume == "auto" and function.__name__ == "_fit_impl"
        return asked == "last" or (asked is None and auto)

    def _newest(self, directories: Iterable[CheckpointDirectory]) -> str:
        try:
            found = newest(directories, verify=True)
        except CheckpointError as error:
            raise ConfigurationError(f"Which checkpoint is the newest cannot be told: {error}") from error
        for problem in found.problems:
            log.warning("Passed over: %s", problem)
        if found.path is None:
            if found.problems:
                say("no checkpoint is whole: goes on from none.")
            return ""
        path = str(found.path)
        if not os.path.lexists(path.removesuffix(".old")):
            path = path.removesuffix(".old")  # the name that it gets back when the run begins; readers know both
        say(f"goes on from {path}.")
        return path


def _directories(callbacks: Iterable[Any]) -> Iterable[CheckpointDirectory]:
    """Of our callbacks; others may have a ``directory`` of another kind."""
    given = (getattr(callback, "directory", None) for callback in callbacks)
    return {each.path: each for each in given if isinstance(each, CheckpointDirectory)}.values()
