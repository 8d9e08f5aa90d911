"""``lightning-replica timeline``: draws a log of incidents as a picture or as a page."""

import argparse
import sys
from pathlib import Path
from typing import Any

from lightning_replica.core.output import write
from lightning_replica.errors import ConfigurationError
from lightning_replica.report.timeline import read

_FORMS = (".svg", ".png", ".html")
_EPILOG = """\
Top: which rank failed when, and which peer sent its shard. Bottom: how long each phase of each recovery took.
The page (.html) has the picture and a table of everything in the log; it needs no other file.

Exit code: 0, or 1 if lines of the log had to be left out.
"""


def add_parser(commands: Any) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "timeline",
        help="draws the incidents of a log",
        description="Draws the incidents of a log. Needs matplotlib: pip install 'lightning-replica[timeline]'.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("log", type=Path, metavar="LOG", help="the log of incidents (JSON Lines)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write: .svg, .png or .html (LOG with .html)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Draw the incidents and return the exit code.

    Raises:
        ConfigurationError: If ``--out`` has another ending or cannot be written, if the log cannot be read or holds no
            incident, or if matplotlib is missing.
    """
    out: Path = options.out or options.log.with_suffix(".html")
    if out.suffix.lower() not in _FORMS:
        raise ConfigurationError(f"--out {out} must end with one of {', '.join(_FORMS)}.")
    incidents, bad = read(options.log)
    for text in bad:
        sys.stderr.write(f"lightning-replica: {text}; left out\n")
    try:
        from lightning_replica.report import page  # matplotlib takes a second to import, and is optional
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"`timeline` needs matplotlib, but {error.name} is not installed: pip install 'lightning-replica[timeline]'"
        ) from error
    forms = {".svg": page.svg, ".png": page.png}
    form = forms.get(out.suffix.lower())
    picture = page.page(incidents, options.log).encode() if form is None else form(incidents)
    try:
        out.write_bytes(picture)
    except OSError as error:
        raise ConfigurationError(f"{out} cannot be written: {error.strerror}.") from error
    write(f"{out}: {len(incidents)} incident{'s' * (len(incidents) != 1)}")
    return 1 if bad else 0
