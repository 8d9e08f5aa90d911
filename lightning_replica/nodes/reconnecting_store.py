"""A connection to the store that is made anew when it stalls, for requests that must be answered soon."""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import torch.distributed as dist

T = TypeVar("T")

_RETRY_S: Final = 0.5
_PAUSE_S: Final = 0.1


class StoreGoneError(Exception):
    """The process that served the store has ended: its machine refuses connections."""


@dataclass(frozen=True)
class Reply(Generic[T]):
    """A reply of the store.

    Attributes:
        sent_at: When the request was made over the connection that has replied, by the monotonic clock.
        value: What the request has returned.
    """

    sent_at: float
    value: T


class ReconnectingStore:
    """Sends requests to the store, and sends them again over a new connection if there is no reply for half a second.

    When a link comes back after some seconds, a connection that has waited continues only at TCP's next attempt, which
    may be as far away as the link was down. A new connection is through at once. One thread at a time may use it.

    Args:
        open_store: Opens a new connection. Raises ConnectionRefusedError if no process serves the store any more, and
            another OSError or DistError if there is no connection for another reason.
    """

    def __init__(self, open_store: Callable[[], dist.Store]) -> None:
        self._open = open_store
        self._store: dist.Store | None = None

    def request(self, work: Callable[[dist.Store], T]) -> Reply[T]:
        """Return the first reply to a request, however long that takes.

        Args:
            work: Makes the request. It is called with a connection, possibly several times and in several threads, each
                with a connection of its own.

        Raises:
            StoreGoneError: If the process that serves the store has ended.
        """
        done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        store = self._store
        while True:
            threading.Thread(target=_try, args=(self._open, store, work, done), daemon=True).start()
            store = None
            try:
                outcome = done.get(timeout=_RETRY_S)
            except queue.Empty:
                continue
            if isinstance(outcome, ConnectionRefusedError):
                raise StoreGoneError from outcome
            if not isinstance(outcome, Exception):
                self._store, reply = outcome
                return reply  # type: ignore[no-any-return]
            time.sleep(_PAUSE_S)  # for example, there is no route


def _try(
    open_store: Callable[[], dist.Store],
    store: dist.Store | None,
    work: Callable[[dist.Store], T],
    done: "queue.SimpleQueue[Any]",
) -> None:
    sent_at = time.monotonic()
    try:
        connection = open_store() if store is None else store
        done.put((connection, Reply(sent_at, work(connection))))
    except (OSError, dist.DistError) as error:
        done.put(error)
