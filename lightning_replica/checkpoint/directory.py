"""The directory of a run's checkpoints: their names, the newest whole one, the tracker, and which are kept.

    <dirpath>/
      step_00000120/                  a checkpoint, published (`publish`)
      step_00000120.old/              the former of that name, for the instant in which it is replaced
      step_00000120.tmp-<8 hex>/      being written; after a crash, what was written of it
      step_00000120.gone-<8 hex>/     being removed
      latest                          the tracker: one line, the name of a whole checkpoint

Only these names are ever written or removed. Any other directory with a manifest is a checkpoint too, which is found
and loaded but never removed.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lightning_replica import checks
from lightning_replica.checkpoint import coverage, publish
from lightning_replica.checkpoint.contents import read_contents
from lightning_replica.checkpoint.manifest import MANIFEST, Manifest
from lightning_replica.errors import CheckpointError, ConfigurationError

TRACKER = "latest"
_STEP = re.compile(r"step_\d{8,}")
_FILE = re.compile(r"plain\.pt|contents\.pt|manifest\.json|\.metadata(\.tmp)?|__\d+_\d+\.distcp")  # see `sharded`


@dataclass(frozen=True)
class Entry:
    """A checkpoint in the directory.

    Attributes:
        path: The directory to load.
        manifest: What it says of itself; None if that cannot be read.
        problem: Why it cannot be used; None if it is whole.
    """

    path: Path
    manifest: Manifest | None
    problem: str | None


@dataclass(frozen=True)
class Latest:
    """The newest whole checkpoint.

    Attributes:
        path: The directory to load; None if there is none.
        manifest: What it says of itself.
        problems: What is wrong with each that would have come before it, with those whose age is not known, and with
            the tracker; sentences for the user.
    """

    path: Path | None
    manifest: Manifest | None
    problems: tuple[str, ...]


class CheckpointDirectory:
    """The checkpoints of a run. One process writes to it; any number may read.

    Args:
        path: The directory. It need not be there yet.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def path_of(self, step: int) -> Path:
        """Where the checkpoint of ``step`` is written."""
        checks.whole(0, step=step)
        return self.path / f"step_{step:08d}"

    def prepare(self) -> None:
        """Makes the directory ready to be written to; at the start of a run, on one rank.

        Removes what our crashes have left, and finishes what they have interrupted. At no instant is the only whole
        checkpoint of a step out of reach.

        Raises:
            ConfigurationError: If it cannot be written to, or something else has a name that is needed.
        """
        probe = self.path / f"{TRACKER}.tmp"
        try:
            publish.make_directory(self.path)
            entries = list(self.path.iterdir())
            for entry in entries:
                self._refuse_foreign(entry)
            publish.write_file(probe, b"can it be written?\n")
            probe.unlink()
        except (OSError, CheckpointError) as error:
            raise ConfigurationError(
                f"dirpath={str(self.path)!r} cannot be written to: {error} Choose another directory."
            ) from error
        for entry in entries:
            if publish.temporary_of(entry.name) and _is_ours(entry):
                publish.discard(entry)
            elif _STEP.fullmatch(entry.name.removesuffix(".old")) and entry.suffix == ".old":
                self._settle(entry.with_suffix(""))

    def track(self, name: str) -> None:
        """Makes the tracker name the checkpoint ``name``, at once.

        Raises:
            CheckpointError: If that is not a whole checkpoint of this directory.
        """
        _check(self._child(name))
        publish.replace_file(self.path / TRACKER, f"{name}\n".encode())

    @property
    def tracked(self) -> str | None:
        """What the tracker says, whatever that is; None if there is none."""
        file = self.path / TRACKER
        return file.read_text(errors="replace").strip() if file.is_file() else None

    def latest(self, verify: bool = False) -> Latest:
        """The newest whole checkpoint: that of the last step, of two of one step the last saved.

        Manifest, files with their sizes and coverage decide, not names, times of files or the tracker.

        Args:
            verify: Whether to take checksums too, which reads every byte.
        """
        problems: list[str] = []
        for entry in self.entries(verify):
            if entry.problem is None:
                return Latest(entry.path, entry.manifest, (*problems, *self._tracker_problems(entry.path, problems)))
            problems.append(entry.problem)
        return Latest(None, None, (*problems, *self._tracker_problems(None, problems)))

    def entries(self, verify: bool = False) -> Iterator[Entry]:
        """Checks all checkpoints, one at a time: those whose age cannot be told, then from the newest to the oldest."""
        ages: dict[Path, tuple[int, int]] = {}
        for path in sorted(self.path.iterdir()) if self.path.is_dir() else ():
            if publish.temporary_of(path.name) or not (_STEP.fullmatch(path.name) or (path / MANIFEST).exists()):
                continue
            try:
                ages[path] = publish.read_manifest(self._child(path.name)).age
            except Exception as error:  # whatever it is, others may be whole
                yield Entry(path, None, _said(path, error))
        for path in sorted(ages, key=lambda path: ages[path], reverse=True):
            yield examine(path, verify)

    def retain(self, keep_last: int) -> list[Path]:
        """Removes all but the newest whole checkpoints.

        Those that are damaged, that the tracker names, or that have other names than `path_of` gives, stay.

        Args:
            keep_last: How many whole ones stay, 1 or more.

        Returns:
            What was removed.
        """
        checks.whole(1, keep_last=keep_last)
        whole = [each.path for each in self.entries() if each.problem is None and _STEP.fullmatch(each.path.name)]
        removed = [path for path in whole[keep_last:] if path.name != self.tracked]
        for path in removed:
            publish.discard(path)
        return removed

    def _child(self, name: str) -> Path:
        """What ``name`` names, if it lies in the directory itself."""
        if name != Path(name).name or name in ("", "..") or "\0" in name:
            raise CheckpointError(f"{name!r} is not the name of a checkpoint in {self.path}.")
        if (self.path / name).is_symlink():
            raise CheckpointError(f"{self.path / name} is a symbolic link, and not followed. Name its target instead.")
        return self.path / name

    def _tracker_problems(self, chosen: Path | None, known: list[str]) -> list[str]:
        name = self.tracked
        if name is None or (chosen is not None and name == chosen.name):
            return []
        try:
            _check(self._child(name))
        except Exception as error:
            said = _said(self.path / name, error)
            more = ", which cannot be used." if said in known else f": {said}"
            return [f"The tracker {self.path / TRACKER} names {name!r}{more}"]
        return []

    def _refuse_foreign(self, entry: Path) -> None:
        """Refuses what has a name that we would replace or remove, and is not ours."""
        if entry.name in (TRACKER, f"{TRACKER}.tmp"):
            ours = entry.is_file()
        elif _STEP.fullmatch(entry.name.removesuffix(".old")):
            ours = entry.is_dir()
            publish.refuse_foreign(entry)
        else:
            return
        if entry.is_symlink() or not ours:
            raise CheckpointError(f"{entry} is not what a run writes under this name. Move it away.")

    def _settle(self, path: Path) -> None:
        """Ends what a crash interrupted while ``path`` was being replaced."""
        former = publish.aside(path)
        if not path.exists():
            publish.restore(former, path)
            return
        if examine(path).problem is None:  # otherwise the former may be the only one
            publish.discard(former)


def examine(path: Path, verify: bool = False) -> Entry:
    """Checks one checkpoint.

    Args:
        path: Its directory.
        verify: Whether to take checksums too, which reads every byte.
    """
    manifest = None
    try:
        manifest = publish.read_manifest(path)
        _check(path, verify)
    except Exception as error:
        return Entry(path, manifest, _said(path, error))
    return Entry(path, manifest, None)


def holds_others(path: Path) -> bool:
    """Whether ``path`` is a directory of checkpoints, and none itself."""
    return path.is_dir() and not (path / MANIFEST).exists()


def find(path: str | Path) -> tuple[Path, tuple[str, ...]]:
    """The checkpoint that ``path`` names: itself, or the newest whole one of a directory of checkpoints.

    Returns:
        The directory to load, unchecked if it is ``path`` itself; and `Latest.problems`.

    Raises:
        CheckpointError: If there is none.
    """
    path = Path(path)
    if not holds_others(path):
        return publish.published(path), ()
    latest = CheckpointDirectory(path).latest()
    if latest.path is None:
        others = latest.problems or ("No directory in it has one.",)
        raise CheckpointError(f"There is no checkpoint at {path}: it has no {MANIFEST}. {' '.join(others)}")
    return latest.path, latest.problems


def _check(path: Path, verify: bool = False) -> None:
    directory = publish.published(path)
    manifest = publish.verify(directory) if verify else publish.check(directory)
    coverage.check(directory, manifest, read_contents(directory))


def _is_ours(temporary: Path) -> bool:
    """Whether it is a directory that holds nothing but what a save writes."""
    if temporary.is_symlink() or not temporary.is_dir():
        return False
    return all(_FILE.fullmatch(entry.name) and not entry.is_dir() for entry in temporary.iterdir())


def _said(path: Path, error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{path} cannot be read: {error!r}."
