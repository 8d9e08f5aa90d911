"""Work that one rank does for all ranks before there are process groups."""

import itertools
import json
import time
from collections.abc import Callable

from lightning_replica.control import keys
from lightning_replica.control.departures import has_left
from lightning_replica.errors import ConfigurationError
from lightning_replica.stores.interface import Store

_POLL_S = 0.05
# Of this process. Every rank runs the same script, and so makes these calls in the same order.
_numbers = itertools.count()


def run_on_rank0(rank: int, store: Store, work: Callable[[], str], timeout_s: float) -> str:
    """Call ``work`` on rank 0, and return its result on every rank. A replacement gets the same result.

    Once rank 0 works, the wait has no time-out, as ``work`` may have much to read.

    Args:
        rank: This rank.
        store: The store that keeps the result.
        work: The work of rank 0, which returns the result.
        timeout_s: How long the other ranks wait until rank 0 begins to work, in seconds.

    Raises:
        ConfigurationError: On every rank, if ``work`` raised it; on the other ranks, if rank 0 makes no such call.
    """
    number = next(_numbers)
    key, began = keys.rank0_result(number), keys.rank0_began(number)
    if rank == 0 and not store.check([key]):
        store.set(began, "yes")  # an empty value would count as none
        try:
            store.set(key, json.dumps({"result": work()}))
        except ConfigurationError as error:
            store.set(key, json.dumps({"error": str(error)}))
            raise
    deadline = time.monotonic() + timeout_s
    while not store.check([key]):
        missing = not store.check([began])
        if missing and (has_left(store, 0) or time.monotonic() > deadline):
            raise ConfigurationError(
                "This rank waits for rank 0, which has ended or has not made the same call of the trainer within"
                f" {timeout_s:g} s (rendezvous_timeout_s): `fit`, `validate`, `test` and `predict` are for all ranks."
            )
        time.sleep(_POLL_S)
    found: dict[str, str] = json.loads(store.get(key))
    if "error" in found:
        raise ConfigurationError(found["error"])
    return found["result"]
