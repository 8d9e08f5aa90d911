"""Appends lines to files so that a kill of the process leaves no partial line."""

from pathlib import Path


def append(path: Path, text: str) -> None:
    """Append to a file in one write, so that a process that is killed leaves all of the text or none of it.

    Raises:
        OSError: If the file cannot be written.
    """
    with path.open("ab", buffering=0) as file:
        file.write(text.encode())
