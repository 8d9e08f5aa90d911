"""The entry point of the command line."""

import argparse
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from lightning_replica._version import __version__
from lightning_replica.core import streams
from lightning_replica.core.output import warn
from lightning_replica.errors import CheckpointError, ConfigurationError

# Modules of `cli`.
_COMMANDS = ("doctor", "run", "store", "plan", "inspect", "export", "save", "verify", "chaos", "timeline")
_DESCRIPTION = "Checks machines and jobs before `Trainer(strategy='replica_zero')` runs, and inspects what it leaves."


def parser() -> argparse.ArgumentParser:
    """Build the parser of all commands and their options."""
    top = argparse.ArgumentParser("lightning-replica", description=_DESCRIPTION)
    top.add_argument("--version", action="version", version=f"lightning-replica {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in _COMMANDS:
        try:
            command = import_module(f"lightning_replica.cli.{name}")
        except ImportError as error:
            _add_unavailable(commands, name, error)
        else:
            command.add_parser(commands)
    return top


def _add_unavailable(commands: Any, name: str, error: ImportError) -> None:
    """Add a command that cannot be imported, as without a Lightning: `doctor` works, and says what is missing."""

    def refuse(_: argparse.Namespace) -> NoReturn:
        raise ConfigurationError(
            f"`{name}` cannot run: {str(error).rstrip('.')}. `lightning-replica doctor` says what is missing."
        )

    # All that follows is taken as it is: no option is known.
    parser = commands.add_parser(name, help="cannot run: see `doctor`", add_help=False, prefix_chars="\0")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    parser.set_defaults(run=refuse)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 1 after a `CheckpointError`, 2 after a `ConfigurationError`."""
    streams.complete()
    options = parser().parse_args(arguments)
    try:
        code: int = options.run(options)
    except ConfigurationError as error:
        warn(str(error))
        return 2
    except CheckpointError as error:
        warn(str(error))
        return 1
    return code
