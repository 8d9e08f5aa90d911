"""The directory of a run's checkpoints: their names, the newest whole one, the tracker, and which are kept.

    <dirpath>/
      step_00000120/                  a checkpoint, published (`publish`)
      step_00000120.old/              the former checkpoint of that name, while it is replaced
      step_00000120.tmp-<8 hex>/      being written; after a crash, the files written so far
      step_00000120.gone-<8 hex>/     being removed
      .lease                          locked by the ranks of the run that writes here (`lease`)
      latest                          the tracker: one line, the name of a whole checkpoint
      failures.json                   how often runs have failed at one step (`failures`)

Runs write and remove only these names (the lease stays), and ``latest.tmp`` and ``failures.json.tmp`` while they
replace the two files. Any other directory with a manifest is a checkpoint too: it is found and loaded, but never
removed. A store of objects holds only ``step_...``, ``latest``, ``failures.json`` and, at the start of a run,
``latest.tmp``; see `attempts`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lightning_replica.checkpoint import coverage, verification
from lightning_replica.checkpoint.contents import PLAIN, read_contents, read_plain
from lightning_replica.checkpoint.location import Given, Location, Url, locate
from lightning_replica.checkpoint.manifest import MANIFEST, Lineage, Manifest
from lightning_replica.checkpoint.storage import STEP, TRACKER, Readable
from lightning_replica.checkpoint.which_storage import storage_of
from lightning_replica.core import checks
from lightning_replica.errors import CheckpointError, ConfigurationError


@dataclass(frozen=True)
class Entry:
    """A checkpoint in the directory.

    Attributes:
        path: The directory to load.
        manifest: Its manifest; None if that cannot be read.
        problem: Why the checkpoint cannot be used; None if it is whole.
    """

    path: Location
    manifest: Manifest | None
    problem: str | None


@dataclass(frozen=True)
class Latest:
    """The newest whole checkpoint.

    Attributes:
        path: The directory to load; None if there is none.
        manifest: Its manifest; None if there is no checkpoint.
        problems: What is wrong with every newer checkpoint, with those whose age is not known, and with the tracker.
            Each entry is a text for the user.
    """

    path: Location | None
    manifest: Manifest | None
    problems: tuple[str, ...]


class CheckpointDirectory:
    """The checkpoints of a run. One process writes to it; any number may read.

    Args:
        path: The directory, or its URL. It need not exist yet.

    Attributes:
        path: The location of the directory.

    Raises:
        ConfigurationError: If ``path`` is a URL that no installed package can access.
    """

    def __init__(self, path: Given) -> None:
        self.path = locate(path)
        self._storage = storage_of(self.path)
        self._storage.check_installed()

    def path_of(self, step: int) -> Location:
        """Return where the checkpoint of ``step`` is written."""
        checks.whole(0, step=step)
        return self.path / f"step_{step:08d}"

    def prepare(self) -> None:
        """Prepare the directory for writing. Called at the start of a run, on one rank.

        This removes what crashes of earlier runs left unfinished, and finishes the replacements that they interrupted.
        If a step has only one whole checkpoint, readers can find it at every instant.

        Raises:
            ConfigurationError: If the directory cannot be written to, or if something that a run did not write has one
                of the names.
        """
        try:
            halves = self._storage.prepare()
        except (OSError, CheckpointError) as error:
            raise ConfigurationError(
                f"dirpath={str(self.path)!r} cannot be written to: {error} Choose another directory."
            ) from error
        for name in halves:
            path = self.path / name
            self._storage.settle(name, None if examine(path).problem else verification.published(path).directory)

    def track(self, name: str) -> None:
        """Make the tracker name the checkpoint ``name``, atomically.

        Raises:
            CheckpointError: If ``name`` is not a whole checkpoint of this directory.
        """
        _check(self._storage.child(name))
        self._storage.write(TRACKER, f"{name}\n".encode())

    @property
    def tracked(self) -> str | None:
        """The text of the tracker, not checked; None if there is no tracker."""
        content = self._storage.read(TRACKER)
        return None if content is None else content.decode(errors="replace").strip()

    def latest(self, verify: bool = False) -> Latest:
        """Return the newest whole checkpoint: the one of the last step, and among those the one saved last.

        The manifest, the files' sizes and the coverage decide. Names, times of files and the tracker do not.

        Args:
            verify: Whether to compare checksums too, which reads every byte.

        Raises:
            CheckpointError: If a store cannot be listed.
        """
        return newest([self], verify)

    def entries(self, verify: bool = False) -> Iterator[Entry]:
        """Check and yield all checkpoints: first those of unknown age, then the others from newest to oldest."""
        return _entries([self], verify)

    def listed(self) -> Iterator["Entry | _Aged"]:
        """Yield all checkpoints with their age, unchecked; those whose age cannot be read as an `Entry`."""
        for name in self._storage.names():
            path = self.path / name
            try:
                found = _version_to_read(self._storage.child(name))
                yield _Aged(verification.read_manifest(found), path, found)
            except Exception as error:  # after any error, other checkpoints may still be whole
                yield Entry(path, None, _said(path, error))

    @property
    def last_run(self) -> int:
        """The number of the last run that has written a checkpoint here; 0 if none has.

        Raises:
            CheckpointError: If a store cannot be listed.
        """
        return max((each.manifest.lineage.run for each in self.listed() if isinstance(each, _Aged)), default=0)

    def retain(self, keep_last: int, lineage: Lineage | None = None) -> list[Location]:
        """Remove all but the newest whole checkpoints.

        Checkpoints that are damaged, that the tracker names, or whose name is not of the form of `path_of`, stay.

        Args:
            keep_last: How many whole checkpoints stay, 1 or more.
            lineage: Of which training, with what it goes on from; all others stay. None for all.

        Returns:
            The checkpoints that were removed.
        """
        checks.whole(1, keep_last=keep_last)
        named = (each for each in self.entries() if each.problem is None and STEP.fullmatch(each.path.name))
        whole = [each.path for each in named if lineage is None or _includes(lineage, each.manifest)]
        tracked = self.tracked
        removed = [path for path in whole[keep_last:] if path.name != tracked]
        for path in removed:
            self._storage.discard(path.name)
        return removed

    def tracker_problems(self, chosen: Location | None, known: list[str]) -> list[str]:
        """Return what is wrong with the tracker: one text for the user, or none.

        Args:
            chosen: A checkpoint that is known to be whole; None if there is none.
            known: Texts that the user gets anyway, and that are not repeated.
        """
        name = self.tracked
        if name is None or (chosen is not None and (name, self.path) == (chosen.name, chosen.parent)):
            return []
        try:
            _check(self._storage.child(name))
        except Exception as error:
            said = _said(self.path / name, error)
            more = ", which cannot be used." if said in known else f": {said}"
            return [f"The tracker {self.path / TRACKER} names {name!r}{more}"]
        return []


@dataclass(frozen=True)
class _Aged:
    """A checkpoint of which only the age is known.

    Attributes:
        manifest: Its manifest.
        path: The directory to load.
        found: Where to read the checkpoint from.
    """

    manifest: Manifest
    path: Location
    found: Readable


def _includes(lineage: Lineage, manifest: Manifest | None) -> bool:
    return manifest is not None and lineage.includes(manifest.lineage, manifest.step)


def newest(directories: Iterable[CheckpointDirectory], verify: bool = False, fit: int | None = None) -> Latest:
    """Return the newest whole checkpoint of several directories; see `CheckpointDirectory.latest`.

    Older checkpoints than that one are not checked.

    Args:
        directories: The directories.
        verify: Whether to compare checksums too, which reads every byte.
        fit: Of which fit of a script; see `Lineage`. None for all.

    Raises:
        CheckpointError: If a store cannot be listed.
    """
    directories, problems = list(directories), []
    whole = None
    for entry in _entries(directories, verify, fit):
        if entry.problem is None:
            whole = entry
            break
        problems.append(entry.problem)
    chosen = None if whole is None else whole.path
    problems += [said for each in directories for said in each.tracker_problems(chosen, problems)]
    return Latest(chosen, None if whole is None else whole.manifest, tuple(problems))


def _entries(directories: Iterable[CheckpointDirectory], verify: bool, fit: int | None = None) -> Iterator[Entry]:
    """Check and yield checkpoints: first those of unknown age, then the others from newest to oldest."""
    aged: list[_Aged] = []
    for found in (each for directory in directories for each in directory.listed()):
        if isinstance(found, Entry):
            yield found
        elif fit in (None, found.manifest.lineage.fit):
            aged.append(found)
    for each in sorted(aged, key=lambda each: each.manifest.age, reverse=True):
        yield _examined(each.path, each.found, verify)


def examine(path: Location, verify: bool = False) -> Entry:
    """Check one checkpoint.

    Args:
        path: Its directory.
        verify: Whether to compare checksums too, which reads every byte.
    """
    try:
        found = _version_to_read(path)
    except CheckpointError as error:
        return Entry(path, None, str(error))
    return _examined(path, found, verify)


def _version_to_read(path: Location) -> Readable:
    """Return what is checked of a checkpoint: in a store, the newest attempt; on a disk, not what was set aside."""
    return verification.published(path) if isinstance(path, Url) else path


def find(path: Given) -> tuple[Location, tuple[str, ...]]:
    """Find the checkpoint that ``path`` names: ``path`` itself, or the newest whole one of a directory of checkpoints.

    Returns:
        The directory to load, and `Latest.problems`. The directory is not checked if ``path`` names it itself.

    Raises:
        CheckpointError: If there is none.
    """
    path = locate(path)
    if not storage_of(path).holds_others():
        return verification.published(path).directory, ()
    latest = CheckpointDirectory(path).latest()
    if latest.path is None:
        others = latest.problems or ("No directory in it has one.",)
        raise CheckpointError(f"There is no checkpoint at {path}: it has no {MANIFEST}. {' '.join(others)}")
    return latest.path, latest.problems


def _examined(path: Location, found: Readable, verify: bool) -> Entry:
    manifest = None
    try:
        manifest = verification.read_manifest(found)
        _check(found, verify)
    except Exception as error:
        return Entry(path, manifest, _said(path, error))
    return Entry(path, manifest, None)


def _check(path: Readable, verify: bool = False) -> None:
    directory = verification.published(path)
    manifest = verification.verify(directory) if verify else verification.check(directory)
    coverage.check(directory, manifest, read_contents(directory))
    if verify:
        read_plain(directory, PLAIN)


def _said(path: Location, error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{path} cannot be read: {error!r}."
