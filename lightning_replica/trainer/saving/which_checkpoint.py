"""Which checkpoint a run resumes from with "last" or "auto": the newest whole one.

Rank 0 chooses once for each fit, for all ranks. A replacement must not find a newer one.

Rank 0 reads every byte of the chosen checkpoint and compares it with its checksum. Otherwise a damaged checkpoint would
end this run, and the next run would choose it again.
"""

import inspect
import json
import logging
import os
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from lightning_replica._compat.lightning import continue_in_place, when_checkpoint_is_chosen
from lightning_replica.checkpoint.directory import CheckpointDirectory, examine, newest
from lightning_replica.checkpoint.location import Location, locate
from lightning_replica.checkpoint.manifest import Lineage
from lightning_replica.core.messages import say
from lightning_replica.errors import CheckpointError, ConfigurationError
from lightning_replica.launch.environment import RankEnvironment
from lightning_replica.trainer.saving.occupation import take_lease

log = logging.getLogger(__name__)

Resume: TypeAlias = Literal["auto"] | None
_LOOKED_UP: Final = (None, "last", "best", "hpc")  # by Lightning; None: in a job that Slurm has started again


class WhichCheckpoint:
    """Fills in ``ckpt_path`` where the user leaves the choice to this package.

    Args:
        resume: Where a fit resumes that is given no checkpoint: "auto" is the newest one, a path is that one, and with
            None it begins anew.
        on_rank0: Calls a function on rank 0 and gives its result to all ranks.
    """

    def __init__(self, resume: str | None, on_rank0: Callable[[Callable[[], str]], str]) -> None:
        self._resume, self._on_rank0 = resume, on_rank0

    def fill_in(
        self, trainer: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> inspect.BoundArguments:
        """Return the arguments of ``Trainer.fit`` and its like, with the newest checkpoint in place of "last" or None.

        Raises:
            ConfigurationError: If the newest checkpoint cannot be found out, or "auto" finds no callback that says
                where checkpoints are.
        """
        bound = inspect.signature(function).bind(*args, **kwargs)
        _count(function)
        if trainer is not None and "ckpt_path" in bound.signature.parameters:
            looked_up = bound.arguments.get("ckpt_path") in _LOOKED_UP
            when_checkpoint_is_chosen(trainer, partial(self._compare, looked_up))
        asked = bound.arguments.get("ckpt_path")
        if self._resume not in (None, "auto") and asked is None and _is_fit(function):
            bound.arguments["ckpt_path"] = self._resume
            return bound
        if trainer is None or "ckpt_path" not in bound.signature.parameters or not self._is_ours(asked, function):
            return bound
        directories = list(_directories(trainer.callbacks))
        if not directories and asked is None:
            raise ConfigurationError(
                "resume='auto' takes the newest checkpoint, but no callback names a directory of checkpoints. Add"
                " DyingGaspCheckpoint(dirpath) or CheckpointPublisher(dirpath), or leave `resume` out."
            )
        fit = None if asked == "last" else _fits
        found = self._on_rank0(lambda: self._newest(directories, fit, writes=_is_fit(function)))
        if found:
            bound.arguments["ckpt_path"] = found
            continue_in_place(trainer)
        return bound

    def _compare(self, looked_up: bool, path: Any) -> None:
        """Check that all ranks are about to load the same checkpoint. A replacement loads none, and may find another.

        Args:
            looked_up: Whether Lightning has looked it up. If not, ranks may have copies of their own.
            path: The checkpoint; None if there is none.

        Raises:
            ConfigurationError: On the ranks that have chosen another one than rank 0.
        """
        own = None if path is None else str(path)
        host, theirs = json.loads(self._on_rank0(lambda: json.dumps([socket.gethostname(), own])))
        environment = RankEnvironment.current()
        if environment is not None and environment.generation:
            return
        same_host, name = host == socket.gethostname(), Path(own or "").name
        same = own == theirs if same_host else name == Path(theirs or "").name
        if (own is None) != (theirs is None) or (looked_up and not same):
            raise ConfigurationError(
                f"This rank is to load {own or 'no checkpoint'}, but rank 0 {theirs or 'none'}. With ckpt_path='last',"
                " 'best' or another name that Lightning looks up, every rank has to find the same one: let all ranks"
                " see one directory, or give the path."
            )

    def _is_ours(self, asked: object, function: Callable[..., Any]) -> bool:
        auto = self._resume == "auto" and _is_fit(function)
        return asked == "last" or (asked is None and auto)

    def _newest(self, directories: Iterable[CheckpointDirectory], fit: int | None, writes: bool) -> str:
        """Return the newest checkpoint of a fit of this script; of all fits, if that is None.

        Args:
            directories: Where to look.
            fit: The number of the fit.
            writes: Whether this run will write there. Another run may still do so, and its last checkpoint is awaited.
        """
        for each in directories if writes else ():
            take_lease(each)
        try:
            found = newest(directories, verify=True, fit=fit)
        except CheckpointError as error:
            raise ConfigurationError(f"The newest checkpoint cannot be determined: {error}") from error
        for problem in found.problems:
            log.warning("Passed over: %s", problem)
        if found.path is None:
            others = None if fit is None else newest(directories).path
            if others is not None:
                say(f"{others} is of another fit of the script than this one, its fit {fit}: this one starts anew.")
            elif found.problems:
                say("no checkpoint is whole: the run starts anew.")
            return ""
        path = str(found.path)
        if not os.path.lexists(path.removesuffix(".old")):
            path = path.removesuffix(".old")  # the run renames it to this when it begins; readers accept both
        say(f"resumes from {path}.")
        return path


_fits = 0  # how many this process has begun: every start of a script begins the same ones in the same order


def _count(function: Callable[..., Any]) -> None:
    global _fits
    _fits += _is_fit(function)


def _is_fit(function: Callable[..., Any]) -> bool:
    return function.__name__ == "_fit_impl"


def fit_number() -> int:
    """Return the number of the present fit in the script."""
    return max(1, _fits)


def begin_run(trainer: Any, directory: CheckpointDirectory) -> Lineage:
    """Return what the present fit is among those that have written to a directory. One process calls this.

    Args:
        trainer: The trainer, which fits.
        directory: One of the directories of its callbacks.

    Raises:
        CheckpointError: If a store cannot be listed.
    """
    directories = {each.path: each for each in (directory, *_directories(trainer.callbacks))}
    lineage = Lineage(1 + max(each.last_run for each in directories.values()), fit_number())
    loaded = None if trainer.ckpt_path is None else locate(trainer.ckpt_path)
    if loaded is None or _real(loaded.parent) != _real(directory.path):
        return lineage
    with suppress(CheckpointError):  # it may have been loaded by another name
        manifest = examine(loaded).manifest
        if manifest is not None:
            before = manifest.lineage
            return replace(lineage, after=(*before.after, (before.run, manifest.step or 0)))
    return lineage


def _real(location: Location) -> Location:
    return location.resolve() if isinstance(location, Path) else location


def _directories(callbacks: Iterable[Any]) -> Iterable[CheckpointDirectory]:
    """Return the directories of this package's callbacks. Others may have a ``directory`` of another kind."""
    given = (getattr(callback, "directory", None) for callback in callbacks)
    return {each.path: each for each in given if isinstance(each, CheckpointDirectory)}.values()
