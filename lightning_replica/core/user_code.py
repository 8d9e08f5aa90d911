"""Which code is the user's: neither this package's, nor installed, nor Python's own."""

import os
import sysconfig
from pathlib import Path
from typing import Final

_OTHERS: Final = tuple(
    f"{place}{os.sep}" for place in (Path(__file__).parents[1], *map(sysconfig.get_path, ("stdlib", "platstdlib")))
)
_INSTALLED: Final = frozenset(("site-packages", "dist-packages"))  # in an environment, of a user, of Debian


def is_users(file: str) -> bool:
    """Return whether code that was compiled from ``file`` is the user's."""
    no_file = file.startswith("<")  # <frozen importlib._bootstrap>, <string>
    return not (no_file or file.startswith(_OTHERS) or is_installed(file))


def is_installed(file: str) -> bool:
    """Return whether ``file`` belongs to an installed package."""
    return bool(_INSTALLED.intersection(Path(file).parts))
