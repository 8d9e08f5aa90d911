"""What a run has left in its directory of checkpoints."""

from pathlib import Path

from lightning_replica.checkpoint.lease import LEASE


def names_in(directory: Path) -> list[str]:
    """The names of all entries but the lease, in alphabetical order."""
    return sorted(entry.name for entry in directory.iterdir() if entry.name != LEASE)
