"""Calls that may wait in the kernel or in C++ without end, where no signal reaches them."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")


def within(timeout_s: float, call: Callable[[], T]) -> T:
    """Return what ``call`` returns. It runs in a thread, which stays behind if it does not end.

    Raises:
        TimeoutError: If it has not ended within ``timeout_s`` seconds; also what ``call`` raises.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="lightning_replica-limited", daemon=True).start()
    if not wait([future], timeout_s).done:
        raise TimeoutError(f"no answer within {timeout_s:g} s")
    return future.result()
