"""Lines that outlive the process that writes them."""

from pathlib import Path


def append(path: Path, text: str) -> None:
    """Adds to a file's end in one write: a process that is killed leaves all of it or nothing.

    Raises:
        OSError: If the file cannot be written.
    """
    with path.open("ab", buffering=0) as file:
        file.write(text.encode())
