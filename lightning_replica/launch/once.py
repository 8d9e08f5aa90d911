"""Something that one rank does for all before there are process groups."""

import itertools
import json
import time
from collections.abc import Callable

from lightning_replica.errors import ConfigurationError
from lightning_replica.recovery.generation import Store

_POLL_S = 0.05
_numbers = itertools.count()  # of this process: a script calls in the same order in each of its ranks


def once(rank: int, store: Store, work: Callable[[], str]) -> str:
    """Call ``work`` on rank 0, and return its result on every rank. A replacement is told the same.

    The wait has no end of its own, as ``work`` may have much to read: it ends with the store or with this process.

    Args:
        rank: This rank.
        store: Where the result is left.
        work: What rank 0 does.

    Raises:
        ConfigurationError: On every rank, if ``work`` raised that.
    """
    key = f"once/{next(_numbers)}"
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
