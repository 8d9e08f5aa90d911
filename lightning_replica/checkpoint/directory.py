"""The directory of a run's checkpoints: their names, the newest whole one, the tracker, and which are kept.

    <dirpath>/
      step_00000120/                  a checkpoint, published (`publish`)
      step_00000120.old/              the former of that name, for the instant in which it is replaced
      step_00000120.tmp-<8 hex>/      being written; after a crash, what was written of it
      step_00000120.gone-<8 hex>/     being removed
      latest                          the tracker: one line, the name of a whole checkpoint
      failures.json                   how often runs have failed at one step (`failures`)

Only these names are ever written or removed. Any other directory with a manifest is a checkpoint too, which is found
and loaded but never removed. In a store of objects there are ``step_...`` and ``latest`` only; see `attempts`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lightning_replica import checks
from lightning_replica.checkpoint import coverage, publish, store
from lightning_replica.checkpoint.attempts import may_have
from lightning_replica.checkpoint.contents import PLAIN, read_contents, read_plain
from lightning_replica.checkpoint.files import Readable
from lightning_replica.checkpoint.location import Given, Location, Url, locate
from lightning_replica.checkpoint.manifest import MANIFEST, Manifest
from lightning_replica.checkpoint.storage import STEP, TRACKER, storage_of
from lightning_replica.errors import CheckpointError, ConfigurationError


@dataclass(frozen=True)
class Entry:
    """A checkpoint in the directory.

    Attributes:
        path: The directory to load.
        manifest: What it says of itself; None if that cannot be read.
        problem: Why it cannot be used; None if it is whole.
    """

    path: Location
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

    path: Location | None
    manifest: Manifest | None
    problems: tuple[str, ...]


class CheckpointDirectory:
    """The checkpoints of a run. One process writes to it; any number may read.

    Args:
        path: The directory, or its URL. It need not be there yet.

    Attributes:
        path: The same.

    Raises:
        ConfigurationError: If it is a URL that nothing installed here reaches.
    """

    def __init__(self, path: Given) -> None:
        self.path = locate(path)
        if isinstance(self.path, Url):
            store.look_for_package(self.path)
        self._storage = storage_of(self.path)

    def path_of(self, step: int) -> Location:
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
        try:
            halves = self._storage.prepare()
        except (OSError, CheckpointError) as error:
            raise ConfigurationError(
                f"dirpath={str(self.path)!r} cannot be written to: {error} Choose another directory."
            ) from error
        for name in halves:
            self._storage.settle(name, whole=examine(self.path / name).problem is None)

    def track(self, name: str) -> None:
        """Makes the tracker name the checkpoint ``name``, at once.

        Raises:
            CheckpointError: If that is not a whole checkpoint of this directory.
        """
        _check(self._storage.child(name))
        self._storage.write(TRACKER, f"{name}\n".encode())

    @property
    def tracked(self) -> str | None:
        """What the tracker says, whatever that is; None if there is none."""
        content = self._storage.read(TRACKER)
        return None if content is None else content.decode(errors="replace").strip()

    def latest(self, verify: bool = False) -> Latest:
        """The newest whole checkpoint: that of the last step, of two of one step the last saved.

        Manifest, files with their sizes and coverage decide, not names, times of files or the tracker.

        Args:
            verify: Whether to take checksums too, which reads every byte.

        Raises:
            CheckpointError: If a store does not say what it holds.
        """
        return newest([self], verify)

    def entries(self, verify: bool = False) -> Iterator[Entry]:
        """Checks all checkpoints, one at a time: those whose age cannot be told, then from the newest to the oldest."""
        return _entries([self], verify)

    def listed(self) -> Iterator["Entry | _Aged"]:
        """What there is: checkpoints of which nothing but the age is known, and those whose age cannot be told."""
        for name in self._storage.names():
            path = self.path / name
            try:
                found = self._storage.child(name)
                yield _Aged(publish.read_manifest(found).age, path, found)
            except Exception as error:  # whatever it is, others may be whole
                yield Entry(path, None, _said(path, error))

    def retain(self, keep_last: int) -> list[Location]:
        """Removes all but the newest whole checkpoints.

        Those that are damaged, that the tracker names, or that have other names than `path_of` gives, stay.

        Args:
            keep_last: How many whole ones stay, 1 or more.

        Returns:
            What was removed.
        """
        checks.whole(1, keep_last=keep_last)
        whole = [each.path for each in self.entries() if each.problem is None and STEP.fullmatch(each.path.name)]
        tracked = self.tracked
        removed = [path for path in whole[keep_last:] if path.name != tracked]
        for path in removed:
            self._storage.discard(path.name)
        return removed

    def tracker_problems(self, chosen: Location | None, known: list[str]) -> list[str]:
        """What is wrong with the tracker.

        Args:
            chosen: A checkpoint that is whole.
            known: Sentences that need not be said again.
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
    """A checkpoint of which the age is known, and no more.

    Attributes:
        age: `Manifest.age`.
        path: The directory to load.
        found: What there is to read.
    """

    age: tuple[int, int]
    path: Location
    found: Readable


def newest(directories: Iterable[CheckpointDirectory], verify: bool = False) -> Latest:
    """The newest whole checkpoint of several directories; see `CheckpointDirectory.latest`.

    Those that are older than that one are not looked at.

    Args:
        directories: The directories.
        verify: Whether to take checksums too, which reads every byte.

    Raises:
        CheckpointError: If a store does not say what it holds.
    """
    directories, problems = list(directories), []
    whole = None
    for entry in _entries(directories, verify):
        if entry.problem is None:
            whole = entry
            break
        problems.append(entry.problem)
    chosen = None if whole is None else whole.path
    problems += [said for each in directories for said in each.tracker_problems(chosen, problems)]
    return Latest(chosen, None if whole is None else whole.manifest, tuple(problems))


def _entries(directories: Iterable[CheckpointDirectory], verify: bool) -> Iterator[Entry]:
    """Checks one at a time: those whose age cannot be told, then from the newest to the oldest."""
    aged: list[_Aged] = []
    for found in (each for directory in directories for each in directory.listed()):
        if isinstance(found, Entry):
            yield found
        else:
            aged.append(found)
    for each in sorted(aged, key=lambda each: each.age, reverse=True):
        yield _examined(each.path, each.found, verify)


def examine(path: Location, verify: bool = False) -> Entry:
    """Checks one checkpoint.

    Args:
        path: Its directory.
        verify: Whether to take checksums too, which reads every byte.
    """
    try:
        found = publish.published(path) if isinstance(path, Url) else path
    except CheckpointError as error:
        return Entry(path, None, str(error))
    return _examined(path, found, verify)


def holds_others(path: Location) -> bool:
    """Whether ``path`` is a directory of checkpoints, and none itself."""
    if isinstance(path, Url):
        names = store.listed(path)
        return bool(names) and not may_have(names)
    return path.is_dir() and not (path / MANIFEST).exists()


def exists(path: Location) -> bool:
    """Whether there is anything at ``path``."""
    return store.is_object(path) or bool(store.listed(path)) if isinstance(path, Url) else path.exists()


def may_be_sharded(path: Location) -> bool:
    """Whether ``path`` is a directory, and so no ordinary ``.ckpt``."""
    if isinstance(path, Url):
        if path.protocol in ("http", "https") or store.is_object(path):  # whoever may read need not be able to list
            return False
        return bool(store.listed(path))
    return path.is_dir() or publish.aside(path).is_dir()


def find(path: Given) -> tuple[Location, tuple[str, ...]]:
    """The checkpoint that ``path`` names: itself, or the newest whole one of a directory of checkpoints.

    Returns:
        The directory to load, unchecked if it is ``path`` itself; and `Latest.problems`.

    Raises:
        CheckpointError: If there is none.
    """
    path = locate(path)
    if not holds_others(path):
        return publish.published(path).directory, ()
    latest = CheckpointDirectory(path).latest()
    if latest.path is None:
        others = latest.problems or ("No directory in it has one.",)
        raise CheckpointError(f"There is no checkpoint at {path}: it has no {MANIFEST}. {' '.join(others)}")
    return latest.path, latest.problems


def _examined(path: Location, found: Readable, verify: bool) -> Entry:
    manifest = None
    try:
        manifest = publish.read_manifest(found)
        _check(found, verify)
    except Exception as error:
        return Entry(path, manifest, _said(path, error))
    return Entry(path, manifest, None)


def _check(path: Readable, verify: bool = False) -> None:
    directory = publish.published(path)
    manifest = publish.verify(directory) if verify else publish.check(directory)
    coverage.check(directory, manifest, read_contents(directory))
    if verify:
        read_plain(directory, PLAIN)


def _said(path: Location, error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{path} cannot be read: {error!r}."
