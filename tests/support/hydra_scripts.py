"""Whether scripts of Hydra's start here: under Python 3.14, argparse refuses a text of Hydra 1.3."""

from typing import Final

import pytest
from hydra._internal.utils import get_args_parser


def hydra_starts() -> bool:
    """Return whether a script with ``hydra.main`` can start."""
    try:
        get_args_parser()
    except ValueError:
        return False
    return True


needs_hydra: Final = pytest.mark.skipif(not hydra_starts(), reason="this Hydra does not start under this Python")
