"""Which ranks are about to close their connections, as their scripts are over. Others may still wait for them."""

from lightning_replica.control import keys
from lightning_replica.stores.interface import Store

_GONE, _HERE, _ENDED = "gone", "here", "ended"


def leave(store: Store, rank: int) -> None:
    """Note that the process of a rank leaves."""
    store.set(keys.left(rank), _GONE)


def end(store: Store, rank: int) -> None:
    """Note that the process of a rank has ended without an error."""
    store.set(keys.left(rank), _ENDED)


def come_back(store: Store, rank: int) -> None:
    """Note that another process has taken the place of a rank's."""
    store.set(keys.left(rank), _HERE)


def has_left(store: Store, rank: int) -> bool:
    """Return whether the last process of a rank has left."""
    return _of(store, rank) in (_GONE, _ENDED)


def has_ended(store: Store, rank: int) -> bool:
    """Return whether the last process of a rank has ended without an error, and is not replaced."""
    return _of(store, rank) == _ENDED


def _of(store: Store, rank: int) -> str:
    key = keys.left(rank)
    return store.get(key).decode() if store.check([key]) else ""
