"""``lightning-replica inspect``: shows what a checkpoint holds, which ranks wrote it, and whether it is whole."""

import argparse
import json
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_replica.core.output import size, table, write

if TYPE_CHECKING:  # at run time these are imported only when the command runs
    from lightning_replica.checkpoint.directory import Entry
    from lightning_replica.checkpoint.location import Location

_EPILOG = """\
A sharded checkpoint is whole if all its files exist and have their sizes, and if it holds every element of every tensor
exactly once. For an ordinary .ckpt, inspect says what Lightning wrote into it and whether torch can read it. With
--verify, it also reads and checks every byte of either.

Exit code: 0 if everything inspected is whole, 1 if something is damaged or nothing was found.
"""


def add_parser(commands: Any) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "inspect",
        help="what is in a checkpoint, and is it whole?",
        description="Inspects a checkpoint of `state_dict_type='sharded'`, a directory of them, or a .ckpt.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", metavar="CKPT", help="a checkpoint, a directory of them, or a .ckpt; or its URL")
    parser.add_argument("--verify", action="store_true", help="check the checksum of every file")
    parser.add_argument("--tensors", action="store_true", help="list all tensors")
    parser.add_argument("--json", action="store_true", help="write JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Inspect the checkpoint, write what was found, and return the exit code.

    Raises:
        CheckpointError: If there is no checkpoint, or no whole one in a directory of checkpoints.
    """
    from lightning_replica.checkpoint.location import locate
    from lightning_replica.checkpoint.which_storage import storage_of
    from lightning_replica.cli import one_file

    path = locate(options.checkpoint)
    if storage_of(path).is_file():
        facts, problems = one_file.inspect(path, options.verify, options.tensors)
        if options.json:
            _write_json(problems, None, [facts])
        else:
            write(one_file.render(facts))
            write(_conclusion(problems, one_file.conclusion(facts)))
        return 1 if problems else 0
    return _look_at_sharded(path, options)


def _look_at_sharded(path: "Location", options: argparse.Namespace) -> int:
    from lightning_replica.checkpoint.directory import CheckpointDirectory, examine, find
    from lightning_replica.checkpoint.which_storage import storage_of

    directory = CheckpointDirectory(path) if storage_of(path).holds_others() else None
    found, more = find(path)
    entries = [examine(found, options.verify)] if directory is None else list(directory.entries(options.verify))
    facts = [_facts(entry, options.tensors) for entry in entries]
    tracked = None if directory is None else directory.tracked
    problems = list(dict.fromkeys([*(entry.problem for entry in entries if entry.problem), *more]))
    if options.json:
        _write_json(problems, tracked, facts)
    else:
        if directory is not None:
            write(_overview(facts, tracked) + "\n")
        write(_render(next((each for each in facts if each["whole"]), facts[-1])))
        write(_conclusion(problems, "whole" + ", to the last byte" * options.verify))
    return 1 if problems else 0


def _write_json(problems: list[str], tracked: str | None, facts: list[dict[str, Any]]) -> None:
    write(json.dumps({"problems": problems, "tracked": tracked, "checkpoints": facts}, indent=2))


def _conclusion(problems: list[str], otherwise: str) -> str:
    return "\n" + "\n".join(problems) if problems else otherwise


def _facts(entry: "Entry", tensors: bool) -> dict[str, Any]:
    """Return the facts about a checkpoint, as plain data."""
    facts: dict[str, Any] = {"path": str(entry.path), "form": "sharded", "whole": entry.problem is None}
    manifest = entry.manifest
    if manifest is not None:
        saved = datetime.fromtimestamp(manifest.saved_ns // 10**9, timezone.utc)
        facts |= {
            "step": manifest.step,
            "run": manifest.lineage.run,
            "fit": manifest.lineage.fit,
            "written_for": manifest.written_for,
            "saved": saved.isoformat(sep=" "),
            "writers": {str(rank): host for rank, host in sorted(manifest.writers.items())},
            "world_size": manifest.world_size,
            "replicas": manifest.replicas,
            "partition": manifest.partition,
            "versions": dict(manifest.versions),
            "size_bytes": manifest.size_bytes,
            "files": len(manifest.files) + 1,
        }
    return facts if entry.problem else facts | _inside(entry, tensors)


def _inside(entry: "Entry", tensors: bool) -> dict[str, Any]:
    """Return the facts in the contents of a whole checkpoint."""
    from lightning_replica.checkpoint.contents import read_contents
    from lightning_replica.checkpoint.verification import published

    contents = read_contents(published(entry.path))
    trained = {n for each in contents.optimizers for group in each.groups for n in group["params"]}
    facts: dict[str, Any] = {
        "parameters": sum(contents.weights[name].numel for name in trained),
        "other_elements": sum(info.numel for name, info in contents.weights.items() if name not in trained),
        "main_parameters": sorted(set(contents.main.values())),
        "optimizers": [each.name for each in contents.optimizers],
    }
    if tensors:
        facts["tensors"] = {
            name: {"elements": numel, "dtype": dtype} for name, (numel, dtype) in contents.tensors().items()
        }
    return facts


def _overview(facts: list[dict[str, Any]], tracked: str | None) -> str:
    """Return a table of all checkpoints of a directory."""
    rows = []
    for each in facts:
        name = Path(each["path"]).name
        said = ("whole" if each["whole"] else "DAMAGED") + (", tracked" if name == tracked else "")
        cells = [_of(each, name) for name in ("run", "step", "written_for", "saved")]
        rows.append([name, *cells, size(each["size_bytes"]) if "size_bytes" in each else "?", said])
    return table(["checkpoint", "run", "step", "for", "saved (UTC)", "size", ""], rows, left=True)


def _of(facts: dict[str, Any], key: str) -> str:
    value = facts.get(key)
    return "?" if value is None else str(value).removesuffix("+00:00")


def _render(facts: dict[str, Any]) -> str:
    """Return a description of one checkpoint, as text for people."""
    lines = {"checkpoint": facts["path"]}
    if "step" in facts:
        hosts = sorted(set(facts["writers"].values()))
        lines |= {
            "step": _of(facts, "step"),
            "written for": facts["written_for"],
            "saved": f"{_of(facts, 'saved')} UTC by rank {', '.join(facts['writers'])} on {', '.join(hosts)}",
            "run": f"{facts['run']}, fit {facts['fit']} of its script",
            "ranks": f"{facts['world_size']}, replicas={facts['replicas']}, partition={facts['partition']!r}",
            "versions": ", ".join(f"{name} {version}" for name, version in facts["versions"].items()),
            "size": f"{size(facts['size_bytes'])} in {facts['files']} files",
        }
    if "parameters" in facts:
        main = f", main parameters in {', '.join(facts['main_parameters'])}" if facts["main_parameters"] else ""
        lines |= {
            "weights": f"{facts['parameters']:,} trained, {facts['other_elements']:,} others{main}",
            "optimizers": ", ".join(facts["optimizers"]),
        }
    text = "\n".join(f"{name:<13}{value}" for name, value in lines.items())
    rows = [[name, f"{each['elements']:,}", each["dtype"]] for name, each in facts.get("tensors", {}).items()]
    return text + ("\n\n" + table(["tensor", "elements", "dtype"], rows) + "\n" if rows else "")
