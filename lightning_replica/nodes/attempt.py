"""Which attempt of a run a node takes part in. One store may serve several runs, one after the other or at once.

All keys of an attempt have its prefix. An attempt is closed when its ranks have ended, or when none of its nodes gives
a sign of life any more: a job that is started again then finds nothing of the one before.
"""

import time
from typing import Final

import torch.distributed as dist

from lightning_replica.control import keys
from lightning_replica.nodes.placement import Placement
from lightning_replica.nodes.settings import NodeSettings

_LOOKS: Final = 20  # during the time-out


def enter(store: dist.Store, settings: NodeSettings) -> str:
    """Return the prefix of the attempt that is open now.

    Args:
        store: A connection to the whole store.
        settings: The nodes' settings.
    """
    number = int(store.compare_set(keys.attempt(settings.run_id), "", "1"))
    while not _is_open(dist.PrefixStore(_prefix(settings, number), store), settings):
        store.compare_set(keys.attempt(settings.run_id), str(number), str(number + 1))
        number = int(store.get(keys.attempt(settings.run_id)))
    return _prefix(settings, number)


def close(store: dist.Store) -> None:
    """Close an attempt: nodes that come later take part in the next one.

    Args:
        store: A connection to the part of the store that is the attempt's.
    """
    store.set(keys.CLOSED, "")


def _prefix(settings: NodeSettings, number: int) -> str:
    return f"{settings.run_id}/{number}"


def _is_open(store: dist.Store, settings: NodeSettings) -> bool:
    if not store.check([keys.CLOSED]):
        if not store.check([keys.NODES_FIRST]) or _gives_signs(store, settings):
            return True
        close(store)
    return False


def _gives_signs(store: dist.Store, settings: NodeSettings) -> bool:
    """Return whether a node that had ranks at first, or got them later, gives a sign of life within the time-out."""
    first = Placement.from_json(store.get(keys.NODES_FIRST))
    numbers = range(max(store.add(keys.NODES_COME, 0), len(first.slots)))
    beats = [keys.beat(number) for number in numbers if store.check([keys.beat(number)])]
    before = store.multi_get(beats)
    for _ in range(_LOOKS):
        time.sleep(settings.node_timeout_s / _LOOKS)
        if store.check([keys.CLOSED]):
            return False
        if store.multi_get(beats) != before:
            return True
    return False
