"""Checkpoints in a store of objects, where nothing can be renamed.

    <url of a checkpoint>/
      1f0c93ab/          an attempt: the files of one save, as in a published directory
        plain.pt ...
        manifest.json    written last: from then on the attempt is the checkpoint

[Note: attempts]
Every save writes objects that no other save writes. So two saves of one checkpoint never mix, even if some ranks give
one of them up. Readers ignore an attempt without a manifest. A save removes the attempt that it replaces only after its
own manifest is written, and removes the old manifest first. So at every instant readers find one whole attempt; after a
crash there may be two. An attempt is complete in itself: copied to a file system it is a checkpoint there, and a
published directory copied from a file system into a store is a checkpoint in the store.
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
    """What the store holds of one attempt.

    Attributes:
        url: The directory of the attempt, or of the checkpoint itself if a checkpoint without attempts was copied
            there.
        sizes: Bytes of each object, by name.
    """

    url: Url
    sizes: Mapping[str, int]

    @property
    def committed(self) -> bool:
        """Whether the attempt has a manifest."""
        return MANIFEST in self.sizes

    @property
    def given_up(self) -> bool:
        """Whether this is a save's attempt without a manifest that holds only objects that a save writes."""
        return not self.committed and _NAME.fullmatch(self.url.name) is not None and all(map(_is_written, self.sizes))

    def remove(self) -> None:
        """Remove the attempt, manifest first, so that it stops being a checkpoint at once.

        Objects that no save writes stay.

        Raises:
            CheckpointError: If the store refuses.
        """
        if self.committed:
            store.remove([self.url / MANIFEST])
        store.remove([self.url / name for name in self.sizes if _is_written(name) and name != MANIFEST])


def new(url: Url) -> Url:
    """Return a new URL under the checkpoint ``url``, for one save to write to."""
    return url / secrets.token_hex(4)


def attempts_at(url: Url) -> list[Attempt]:
    """Return all attempts at the checkpoint ``url``.

    Raises:
        CheckpointError: If the store cannot be listed.
    """
    found: dict[Url, dict[str, int]] = {}
    for key, size in store.objects(url).items():
        folder, _, name = key.rpartition("/")
        if not folder or _NAME.fullmatch(folder):
            found.setdefault(url / folder if folder else url, {})[name] = size
    return [Attempt(*each) for each in found.items()]


def may_have(names: Iterable[str]) -> bool:
    """Return whether a place that holds ``names`` can be a checkpoint."""
    return any(name == MANIFEST or _NAME.fullmatch(name) for name in names)


def _is_written(name: str) -> bool:
    return WRITTEN.fullmatch(name) is not None
