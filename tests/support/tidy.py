"""What a run of the tests has left behind in the working tree."""

import subprocess
from pathlib import Path

_TOOLS = (".", "__pycache__", "lightning_replica.egg-info")  # how names of what tools keep begin


def strewn(root: Path) -> set[str]:
    """Return the files that lie in ``root`` beside what belongs to the project, by their names in it.

    Inside of the project's own folders new files are whatever somebody is writing just now. Where there is no
    repository, nothing is known.
    """
    done = subprocess.run(["git", "ls-tree", "--name-only", "HEAD"], cwd=root, capture_output=True, text=True)
    if done.returncode:
        return set()
    own = set(done.stdout.splitlines())
    found: set[str] = set()
    for entry in root.iterdir():
        if entry.name in own or entry.name.startswith(_TOOLS):
            continue
        files = [file for file in entry.rglob("*") if file.is_file()] if entry.is_dir() else [entry]
        found |= {str(file.relative_to(root)) for file in files or [entry]}
    return found
