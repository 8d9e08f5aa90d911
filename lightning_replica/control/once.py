"""Work that one rank does for all ranks before there are process groups."""

import itertools
import json
import time
from collections.abc import Callable

from lightning_replica.control import keys
from lightning_replica.errors import ConfigurationError
from lightning_replica.stores.interface import Store

_POLL_S = 0.05
_numbers = itertools.count()  # of this process: every rank runs the same script, and so calls `once` in the same order


def once(rank: int, store: Store, work: Callable[[], str]) -> str:
    """Call ``work`` on rank 0, and return its result on every rank. A replacement gets the same result.

    The wait has no time-out, as ``work`` may have much to read. It ends only with a result, the store or this process.

    Args:
        rank: This rank.
        store: The store that keeps the result.
        work: The work of rank 0, which returns the result.

    Raises:
        ConfigurationError: On every rank, if ``work`` raised it.
    """
    key = keys.once(next(_numbers))
    if rank == 0 and not store.check([key]):
        try:
            store.set(key, json.dumps({"result": work()}))
        except ConfigurationError as error:
            store.set(key, json.dumps({"error": str(error)}))
            raise
    while not store.check([key]):
        time.sleep(_POLL_S)
    found: dict[str, str] = json.loads(store.get(key))
    if "error" in found:
        raise ConfigurationError(found["error"])
    return found["result"]
