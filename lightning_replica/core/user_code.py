"""Which code is the user's: neither this package's, nor installed, nor Python's own."""

import sysconfig
from pathlib import Path
from typing import Final

_OTHERS: Final = (
    str(Path(__file__).parents[1]),
    *(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib")),
    "<",  # <frozen importlib._bootstrap>, <string>
)


def is_users(file: str) -> bool:
    """Return whether code that was compiled from ``file`` is the user's."""
    return not file.startswith(_OTHERS)
