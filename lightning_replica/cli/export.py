"""``lightning-replica export``: writes a sharded checkpoint as one file that plain Lightning loads."""

import argparse
from pathlib import Path
from typing import Any

from lightning_replica.core.output import warn, write


def add_parser(commands: Any) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "export",
        help="a sharded checkpoint as one .ckpt file",
        description="Writes a checkpoint of `state_dict_type='sharded'` as one file from which every strategy can"
        " resume. It must fit into memory. Main parameters, which other strategies do not have, are left out.",
    )
    parser.add_argument(
        "directory", help="the sharded checkpoint or its URL, or a directory of them (takes the newest whole one)"
    )
    parser.add_argument("file", type=Path, help="the file to write; an existing file is replaced")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the file and return the exit code."""
    from lightning_replica.checkpoint.directory import find
    from lightning_replica.checkpoint.export import export  # DCP takes a quarter of a second to import

    found, problems = find(options.directory)
    for problem in problems:
        warn(problem)
    export(found, options.file)
    write(f"{found} is exported to {options.file}.")
    return 0
