"""The entry point of the command line."""

import argparse
from collections.abc import Sequence

import lightning_replica
from lightning_replica.cli import chaos, doctor, export, inspect, plan, run, save, store, timeline
from lightning_replica.core.output import warn
from lightning_replica.errors import CheckpointError, ConfigurationError

_DESCRIPTION = "Checks machines and jobs before `Trainer(strategy='replica_zero')` runs, and inspects what it leaves."


def parser() -> argparse.ArgumentParser:
    """Build the parser of all commands and their options."""
    top = argparse.ArgumentParser("lightning-replica", description=_DESCRIPTION)
    top.add_argument("--version", action="version", version=f"lightning-replica {lightning_replica.__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    doctor.add_parser(commands)
    run.add_parser(commands)
    store.add_parser(commands)
    plan.add_parser(commands)
    inspect.add_parser(commands)
    export.add_parser(commands)
    save.add_parser(commands)
    chaos.add_parser(commands)
    timeline.add_parser(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 1 after a `CheckpointError`, 2 after a `ConfigurationError`."""
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
