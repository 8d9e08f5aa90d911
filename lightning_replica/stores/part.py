"""A part of a store: all keys get a prefix."""

import torch.distributed as dist


class Part(dist.PrefixStore):
    """The part of a store whose keys begin with ``prefix`` and a slash.

    torch's own class does not keep a store that is written in Python: its methods would be gone with the object.

    Args:
        prefix: The prefix.
        store: The whole store.
    """

    def __init__(self, prefix: str, store: dist.Store) -> None:
        super().__init__(prefix, store)
        self._whole = store


def part_of(store: dist.Store, prefix: str) -> dist.Store:
    """Return a part of a store; the whole store if ``prefix`` is empty."""
    return Part(prefix, store) if prefix else store
