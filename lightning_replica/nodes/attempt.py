"""Which attempt of a run a node takes part in. One store may serve several runs, one after the other or at once.

All keys of an attempt have its prefix. An attempt is closed when its ranks have ended, or when none of its nodes sends
a heartbeat any more: a job that is started again then finds nothing of the one before.
"""

import time
from typing import Final

import torch.distributed as dist

from lightning_replica.control import keys
from lightning_replica.core.messages import warn
from lightning_replica.nodes.membership import come, first_placement
from lightning_replica.nodes.node_settings import NodeSettings
from lightning_replica.stores.part import part_of
from lightning_replica.stores.reach import forget
from lightning_replica.stores.secret import VARIABLE, name_of, own_secret

_LOOKS: Final = 20  # during the time-out
_NO_SECRET: Final = "none"


def enter(store: dist.Store, settings: NodeSettings) -> str:
    """Return the prefix of the attempt that is open now.

    Args:
        store: A connection to the whole store.
        settings: The nodes' settings.
    """
    _compare_secrets(store, settings)
    number = int(store.compare_set(keys.attempt(_run(settings)), "", "1"))
    while not _is_open(part_of(store, _prefix(settings, number)), settings):
        store.compare_set(keys.attempt(_run(settings)), str(number), str(number + 1))
        number = int(store.get(keys.attempt(_run(settings))))
    if number > 2:  # nodes of the attempt before this one may still be ending
        forget(settings.store, _prefix(settings, number - 2))
    return _prefix(settings, number)


def close(store: dist.Store) -> None:
    """Close an attempt: nodes that come later take part in the next one.

    Args:
        store: A connection to the part of the store that is the attempt's.
    """
    store.set(keys.CLOSED, "")


def _compare_secrets(store: dist.Store, settings: NodeSettings) -> None:
    """Tell the user if a node of this run has come with another secret. It may be of an earlier run.

    A store with tags says by itself that another process has left another value here.
    """
    found = store.compare_set(keys.secret(settings.run_id), "", _NO_SECRET)
    if found != _NO_SECRET.encode():
        warn(
            f"a node of the run {settings.run_id!r} has come to {settings.store.endpoint} with a secret ({VARIABLE}),"
            " and this node has none. They do not meet. Give the same secret to all nodes."
        )


def _run(settings: NodeSettings) -> str:
    """Return the name of a run in the store. Nodes with different secrets do not meet, and so harm nobody."""
    return "/".join(filter(None, [settings.run_id, name_of(own_secret())]))


def _prefix(settings: NodeSettings, number: int) -> str:
    return f"{_run(settings)}/{number}"


def _is_open(store: dist.Store, settings: NodeSettings) -> bool:
    if not store.check([keys.CLOSED]):
        if not store.check([keys.NODES_FIRST]) or _sends_heartbeats(store, settings):
            return True
        close(store)
    return False


def _sends_heartbeats(store: dist.Store, settings: NodeSettings) -> bool:
    """Return whether a node that had ranks at first, or got them later, sends a heartbeat within the time-out."""
    numbers = range(max(come(store), *(1 + number for number in first_placement(store).nodes)))
    beats = [keys.beat(number) for number in numbers if store.check([keys.beat(number)])]
    before = store.multi_get(beats)
    for _ in range(_LOOKS):
        time.sleep(settings.node_timeout_s / _LOOKS)
        if store.check([keys.CLOSED]):
            return False
        if store.multi_get(beats) != before:
            return True
    return False
