"""Output of the command line; no other module of the package writes to stdout."""

import sys
from collections.abc import Sequence


def write(text: str) -> None:
    """Write lines to stdout and flush."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def warn(text: str) -> None:
    """Write a line to stderr."""
    sys.stderr.write(f"lightning-replica: {text}\n")


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: bool = False) -> str:
    """Return a table with a header. The first column is aligned left, the others right, or left if ``left`` is true."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        others = zip(row[1:], widths[1:], strict=True)
        cells = [row[0].ljust(widths[0]), *(cell.ljust(w) if left else cell.rjust(w) for cell, w in others)]
        return "  " + "  ".join(cells).rstrip()

    return "\n".join([line(header), "  " + "-" * (sum(widths) + 2 * len(widths) - 2), *map(line, rows)])


def size(count: float) -> str:
    """Return a number of bytes as readable text, such as ``26.08 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:,.4g} TiB"
