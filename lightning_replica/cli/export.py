"""``lightning-replica export`` and ``import``: checkpoints of ours as other programs write them, and the other way."""

import argparse
from pathlib import Path
from typing import Any

from lightning_replica.core.output import warn, write
from lightning_replica.errors import CheckpointError

_NAMED_AT_MOST = 3


def add_parser(commands: Any) -> None:
    """Add the commands and their options."""
    parser = commands.add_parser(
        "export",
        help="a sharded checkpoint as one .ckpt file, or as megatron-core's",
        description="Writes a checkpoint of `state_dict_type='sharded'` as one file from which every strategy can"
        " resume. It must fit into memory. Main parameters, which other strategies do not have, are left out. With"
        " `--format megatron`, writes a checkpoint of `MegatronReplicaStrategy` as megatron-core does, which loads it"
        " into any sizes: iter_0000123/ and latest_checkpointed_iteration.txt.",
    )
    parser.add_argument(
        "directory", help="the sharded checkpoint or its URL, or a directory of them (takes the newest whole one)"
    )
    parser.add_argument("file", type=Path, help="the file to write, which is replaced; or megatron-core's directory")
    parser.add_argument("--format", choices=("ckpt", "megatron"), default="ckpt", help="default: ckpt")
    parser.set_defaults(run=run)

    parser = commands.add_parser(
        "import",
        help="a checkpoint of megatron-core's as a sharded one",
        description="Writes a sharded checkpoint from one of megatron-core's (format torch_dist). A fit under"
        " `MegatronReplicaStrategy` with `ckpt_path` starts from its weights, and from the optimizer's state if it is"
        " fully reshardable, in any sizes. It must fit into memory.",
    )
    parser.add_argument("directory", type=Path, help="megatron-core's directory, or one iteration in it")
    parser.add_argument("run_directory", help="the directory of a run, or its URL, to write the checkpoint to")
    parser.add_argument("--format", choices=("megatron",), default="megatron", help="default: megatron")
    parser.set_defaults(run=run_import)


def run(options: argparse.Namespace) -> int:
    """Export, and return the exit code."""
    from lightning_replica.checkpoint.directory import find  # DCP takes a quarter of a second to import
    from lightning_replica.checkpoint.export import export
    from lightning_replica.checkpoint.torch_dist import export_megatron

    found, problems = find(options.directory)
    for problem in problems:
        warn(problem)
    if options.format == "ckpt":
        export(found, options.file)
        write(f"{found} is exported to {options.file}.")
        return 0
    target, left_out = export_megatron(found, options.file)
    write(f"{found} is exported to {target}.")
    _report_left_out(left_out, "nothing says where they lie in the whole model")
    return 0


def run_import(options: argparse.Namespace) -> int:
    """Import, and return the exit code."""
    from lightning_replica.checkpoint.from_torch_dist import import_megatron

    if not options.directory.is_dir():
        raise CheckpointError(f"There is no directory {options.directory}.")
    target, left_out = import_megatron(options.directory, options.run_directory)
    write(f"{options.directory} is imported to {target}. Start a fit from it with `ckpt_path`.")
    _report_left_out(left_out, "they do not have the form of a weight")
    return 0


def _report_left_out(names: list[str], why: str) -> None:
    if names:
        more = ", ..." if len(names) > _NAMED_AT_MOST else ""
        warn(f"{len(names)} tensors are left out, because {why}: {', '.join(names[:_NAMED_AT_MOST])}{more}")
