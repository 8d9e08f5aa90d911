"""``lightning-replica``, and ``python -m lightning_replica``."""

import sys

from lightning_replica.cli.main import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
