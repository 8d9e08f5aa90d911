"""Counts the requests of EtcdStore, breaks some, and lets tests do something else meanwhile."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import requests as http
from etcd3gw import Etcd3Client

from lightning_replica.stores.etcd_members import EtcdMembers

SOON = timedelta(seconds=0.2)


def refusal(status: int, text: str) -> http.HTTPError:
    response = http.Response()
    response.status_code, response._content = status, text.encode()
    return http.HTTPError(f"{status} {text}", response=response)


class Requests:
    """Counts requests, and can break one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[dict[str, Any]] = []
        self.watches = 0
        self.lost = 0  # so many answers get lost
        self.refusals: list[tuple[int, str]] = []  # what comes instead of the next answers
        self.after: Callable[[], Any] | None = None  # called once, after the next request
        self.before_watch: Callable[[], None] = lambda: None
        self._transaction, self._watch = Etcd3Client.transaction, EtcdMembers.watch
        requests = self

        def transaction(client: Any, wishes: dict[str, Any]) -> Any:
            requests.sent.append(wishes)
            if requests.refusals:
                raise refusal(*requests.refusals.pop())
            answer = requests._transaction(client, wishes)
            if requests.lost:
                requests.lost -= 1
                raise http.ConnectionError("lost")
            after, requests.after = requests.after, None
            if after is not None:
                after()
            return answer

        def watch(self: EtcdMembers, *arguments: Any) -> None:
            requests.watches += 1
            requests.before_watch()
            requests._watch(self, *arguments)

        monkeypatch.setattr(Etcd3Client, "transaction", transaction)
        monkeypatch.setattr(EtcdMembers, "watch", watch)


@contextmanager
def elsewhere(work: Callable[[], Any]) -> Iterator["Future[Any]"]:
    """Does something in another thread, which must end soon after the block."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        yield future
        future.result(timeout=20)
