"""``lightning-replica doctor``: checks whether this package works on this machine."""

import argparse
import json
from dataclasses import asdict
from typing import Any

from lightning_replica.cli import checks
from lightning_replica.cli.check import Check
from lightning_replica.core.output import write

_EPILOG = """\
The training takes about half a minute: two ranks on the CPU, once untouched and once with a rank that is killed and
replaced; both must end with the same weights, to the last bit.

Exit code: 0 if everything works, 1 if something failed.
"""
_MARKS = {"ok": "ok", "note": "-", "failed": "FAILED"}


def add_parser(commands: Any) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "doctor",
        help="does `replica_zero` work on this machine?",
        description="Checks versions, devices, backends, memory and network, and trains on two ranks.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="write JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run all checks, write each result as soon as it is known, and return the exit code."""
    found = []
    for look in checks.ALL:
        for check in look():
            found.append(check)
            if not options.json:
                write(line(check))
    good = all(check.status != "failed" for check in found)
    if options.json:
        write(json.dumps({"ok": good, "checks": [asdict(check) for check in found]}, indent=2))
    else:
        write("\neverything works" if good else "\nsomething failed: see above")
    return 0 if good else 1


def line(check: Check) -> str:
    """Return the result of a check, as text for people."""
    advice = f"\n{'':26}{check.advice}" if check.advice else ""
    return f"{_MARKS[check.status]:<7}{check.name:<19}{check.found}{advice}"
