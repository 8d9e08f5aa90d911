"""``lightning-replica save``: asks a run for a checkpoint; the run continues."""

import argparse
import os
import time
from typing import TYPE_CHECKING, Any

from lightning_replica.control import planned_save
from lightning_replica.control.planned_save import SIGNAL
from lightning_replica.core import checks
from lightning_replica.core.output import write
from lightning_replica.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning_replica.checkpoint.directory import Latest

_LOOK_S = 0.2


def add_parser(commands: Any) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "save",
        help="asks a run for a checkpoint; the run continues",
        description="Asks a run for a checkpoint. All ranks write it before their next batch, into the directory of the"
        " run's CheckpointPublisher or DyingGaspCheckpoint; then the run continues.",
    )
    parser.add_argument("pid", type=int, help="the process that was started as `python train.py`, or any rank")
    parser.add_argument("--dirpath", help="wait until there is a newer whole checkpoint in this directory")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="how long to wait (default: %(default)g)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Send the signal and return the exit code: 1 if no newer checkpoint came in time, else 0."""
    from lightning_replica.checkpoint.directory import CheckpointDirectory  # DCP takes a quarter of a second to import

    checks.seconds(timeout_s=options.timeout_s)
    _refuse_who_does_not_listen(options.pid)
    directory = None if options.dirpath is None else CheckpointDirectory(options.dirpath)
    before = None if directory is None else _age(directory.latest())
    _ask(options.pid)
    if directory is None:
        write(f"Process {options.pid} was asked. It logs a line when the checkpoint is written.")
        return 0
    deadline = time.monotonic() + options.timeout_s
    while time.monotonic() < deadline:
        latest = directory.latest()
        if _age(latest) != before:
            write(f"{latest.path} is written.")
            return 0
        time.sleep(_LOOK_S)
    write(f"No newer checkpoint has appeared in {options.dirpath} within {options.timeout_s:g} s.")
    return 1


def _ask(pid: int) -> None:
    try:
        os.kill(pid, SIGNAL)
    except ProcessLookupError as error:
        raise ConfigurationError(f"Process {pid} has just ended.") from error
    except PermissionError as error:
        raise ConfigurationError(f"Process {pid} belongs to another user: ask as that user, or as root.") from error


def _age(latest: "Latest") -> tuple[int, ...] | None:
    return None if latest.manifest is None else latest.manifest.age


def _refuse_who_does_not_listen(pid: int) -> None:
    """Refuse a process that does not listen for `SIGNAL`: the signal would end it."""
    try:
        listens = planned_save.listens(pid)
    except OSError as error:
        raise ConfigurationError(
            f"/proc shows no process {pid} here (only Linux has /proc). If you know that a run listens,"
            f" `kill -{SIGNAL.name.removeprefix('SIG')} PID` asks it too."
        ) from error
    if not listens:
        raise ConfigurationError(
            f"Process {pid} is not a run that can be asked to save, and {SIGNAL.name} might end it. Name the process"
            " that was started as `python train.py`, with strategy='replica_zero'. Under torchrun or SLURM, name a rank"
            " that is training, with a CheckpointPublisher or a DyingGaspCheckpoint."
        )
