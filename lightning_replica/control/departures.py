"""Which ranks are about to close their connections, as their scripts are over. Others may still wait for them."""

from lightning_replica.control import keys
from lightning_replica.stores.interface import Store

_GONE, _HERE = "gone", "here"


def leave(store: Store, rank: int) -> None:
    """Note that the process of a rank leaves."""
    store.set(keys.left(rank), _GONE)


def come_back(store: Store, rank: int) -> None:
    """Note that another process has taken the place of a rank's."""
    store.set(keys.left(rank), _HERE)


def has_left(store: Store, rank: int) -> bool:
    """Return whether the last process of a rank has left."""
    key = keys.left(rank)
    return store.check([key]) and store.get(key) == _GONE.encode()
