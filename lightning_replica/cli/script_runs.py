"""What the commands share that run a user's script again and again: `verify` and `chaos`."""

import argparse
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_replica.core.output import write
from lightning_replica.errors import ConfigurationError

NOT_STRUCK = 3
"""The exit code if nothing differs and nothing fails, but a fault did not strike: then little is proven."""


def add_options(parser: argparse.ArgumentParser, timeout_s: float) -> None:
    """Add the options that both have, and the command that trains."""
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep logs, fingerprints and incidents here")
    parser.add_argument("--timeout-s", type=float, default=timeout_s, metavar="S", help="a run that takes longer fails")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="--, then the command that trains")


def command_of(given: list[str], name: str) -> list[str]:
    """Return the command that trains.

    Raises:
        ConfigurationError: If there is none.
    """
    command = given[1:] if given[:1] == ["--"] else given
    if not command:
        raise ConfigurationError(f"There is nothing to run: write `lightning-replica {name} -- python train.py`.")
    return command


@contextmanager
def folder_for(out: Path | None, name: str, all_is_well: Callable[[], bool]) -> Iterator[Path]:
    """Make the folder of the runs, ``out`` or a new one; a new one is removed at the end if all is well.

    Raises:
        ConfigurationError: If ``out`` is not empty.
    """
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigurationError(f"--out {out} is not empty: give a new folder.")
    folder = Path(tempfile.mkdtemp(prefix=f"lightning-replica-{name}-")) if out is None else out
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    finally:
        if out is None and all_is_well():
            shutil.rmtree(folder)
        else:
            write(f"Logs and fingerprints are in {folder}.")


def counted(number: int, what: str) -> str:
    """Return a number of things in words."""
    return f"{number} {what}{'s' * (number != 1)}"
