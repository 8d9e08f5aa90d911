"""Checkpoints in a store of objects, where nothing can be renamed.

    <url of a checkpoint>/
      1f0c93ab/          an attempt: the files of one save, as in a published directory
        plain.pt ...
        manifest.json    comes last: from then on the attempt is the checkpoint

[Note: attempts]
Every save writes objects that no other save writes, so two of one checkpoint never mix, whoever gives up which of them.
An attempt without a manifest does not exist for readers. What a newer one replaces is removed after its manifest is
there, manifest first, so at every instant one whole attempt can be found; after a crash there may be two. An attempt is
all that one needs: copied to a file system it is a checkpoint there, and a directory from a file system is one here.
"""

import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lightning_replica.checkpoint import store
from lightning_replica.checkpoint.location import Url
from lightning_replica.checkpoint.manifest import MANIFEST, WRITTEN

_NAME = re.compile(r"[0-9a-f]{8}")


@dataclass(frozen=True)
class Attempt:
    """What the store holds of one.

    Attributes:
        url: Its directory; that of the checkpoint itself where somebody has copied one without attempts.
        sizes: Bytes of each object, by name.
    """

    url: Url
    sizes: Mapping[str, int]

    @property
    def committed(self) -> bool:
        """Whether it has a manifest."""
        return MANIFEST in self.sizes

    @property
    def given_up(self) -> bool:
        """Whether it has none, and is nothing else's."""
        return not self.committed and _NAME.fullmatch(self.url.name) is not None and all(map(_is_written, self.sizes))

    def remove(self) -> None:
        """Removes it; it is no checkpoint as soon as that has begun. Objects that no save writes stay.

        Raises:
            CheckpointError: If the store does not let us.
        """
        if self.committed:
            store.remove([self.url / MANIFEST])
        store.remove([self.url / name for name in self.sizes if _is_written(name) and name != MANIFEST])


def new(url: Url) -> Url:
    """Where the next save of the checkpoint ``url`` writes."""
    return url / secrets.token_hex(4)


def attempts_at(url: Url) -> list[Attempt]:
    """What there is of the checkpoint ``url``.

    Raises:
        CheckpointError: If the store does not say.
    """
    found: dict[Url, dict[str, int]] = {}
    for key, size in store.objects(url).items():
        folder, _, name = key.rpartition("/")
        if not folder or _NAME.fullmatch(folder):
            found.setdefault(url / folder if folder else url, {})[name] = size
    return [Attempt(*each) for each in found.items()]


def may_have(names: Iterable[str]) -> bool:
    """Whether what has ``names`` in it can be a checkpoint."""
    return any(name == MANIFEST or _NAME.fullmatch(name) for name in names)


def _is_written(name: str) -> bool:
    return WRITTEN.fullmatch(name) is not None
