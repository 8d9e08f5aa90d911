"""The members of an etcd: a question goes to one of them, and to the others if that one does not answer."""

import json
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, Final, TypeVar

import requests
import torch.distributed as dist
from etcd3gw import Etcd3Client
from etcd3gw.exceptions import Etcd3Exception

from lightning_replica.stores.address import EtcdAddress

T = TypeVar("T")

_CONNECT_S: Final = 1.0
_ANSWER_S: Final = 2.0
_ELECTION_S: Final = 5.0  # so long may members take to agree on a leader
_PAUSE_S: Final = 0.05
_CLOSED: Final = "closed connection without response"


class EtcdMembers:
    """Connections to the members, of which one answers until it fails. One thread at a time may use them.

    Args:
        address: Where etcd is. Nothing connects before the first question.
    """

    def __init__(self, address: EtcdAddress) -> None:
        self._clients = deque(_client(address, host, port) for host, port in address.endpoints)
        # So not all processes begin with the same member. Not `random`: it belongs to the training.
        self._clients.rotate(secrets.randbelow(len(self._clients)))

    def transact(self, transaction: dict[str, Any]) -> dict[str, Any]:
        """Carry out a transaction of etcd's JSON interface, and return the answer. Raises what `ask` raises."""
        answer: Any = self.ask(lambda client: client.transaction(transaction))
        return dict(answer)

    def watch(self, keys: Collection[str], revision: int, limit_s: float) -> None:
        """Wait until all ``keys`` have been written since ``revision``, or ``limit_s`` has passed; or return early.

        Args:
            keys: The keys, in base64.
            revision: A revision of the store. What was written at that revision counts.
            limit_s: How long to wait, in seconds.

        Raises:
            DistNetworkError: If no member answers.
        """
        self.ask(lambda client: _watch(client, keys, revision, limit_s))

    def ask(self, question: Callable[[Etcd3Client], T]) -> T:
        """Return the answer of the first member that has one.

        Each member is asked once. If some say that they cannot answer now, as they have no leader, all are asked again.

        Args:
            question: Called with a connection, possibly several times: a member may do what it was asked to, and fail
                before it answers.

        Raises:
            DistNetworkError: If no member answers.
            DistStoreError: If etcd refuses to do it.
        """
        deadline = time.monotonic() + _ELECTION_S
        while True:
            errors: list[Exception] = []
            for client in tuple(self._clients):
                try:
                    return question(client)
                except (Etcd3Exception, requests.RequestException) as error:
                    _raise_if_final(error)
                    errors.append(error)
                    self._clients.rotate(-1)
            alive = any(isinstance(error, requests.HTTPError) for error in errors)
            if not alive or time.monotonic() > deadline:
                text = _text(errors, self._clients)
                raise dist.DistNetworkError(f"No member of etcd answers: {text}") from errors[-1]
            time.sleep(_PAUSE_S)


def _text(errors: list[Exception], clients: Collection[Etcd3Client]) -> str:
    """Return what is wrong with each member. etcd3gw's errors have no text but an attribute."""
    texts = [getattr(error, "detail_text", None) or str(error) for error in errors]
    answers = [f"{each.host}:{each.port}: {text}" for each, text in zip(clients, texts, strict=True)]
    if any(each.protocol == "http" and _CLOSED in text for each, text in zip(clients, texts, strict=True)):
        answers.append("a member that takes TLS only closes other connections: give it `ca_cert` in --rdzv-conf")
    return "; ".join(answers)


def _raise_if_final(error: Exception) -> None:
    """Raise an error if all members would say the same, as there is something wrong with the request."""
    response = error.response if isinstance(error, requests.HTTPError) else None
    if response is not None and response.status_code < 500 and "too many requests" not in response.text:
        raise dist.DistStoreError(f"etcd refuses a request: {error}") from error


def _client(address: EtcdAddress, host: str, port: int) -> Etcd3Client:
    protocol = "http" if address.ca_cert is None else "https"
    time_outs: Any = (_CONNECT_S, _ANSWER_S)  # requests takes two; etcd3gw passes on what it gets, typed as one
    client = Etcd3Client(host, port, protocol, address.ca_cert, address.key, address.cert, time_outs, "/v3/")
    client.session.trust_env = False  # a proxy for the internet, or another authority
    # etcd3gw's own errors do not tell a member that has no leader from one that refuses connections.
    client.session.hooks["response"].append(_raise_for_status)
    return client


def _raise_for_status(response: requests.Response, *_: Any, **__: Any) -> None:
    if not response.ok:
        raise requests.HTTPError(f"{response.status_code} {response.text.strip()}", response=response)


def _watch(client: Etcd3Client, keys: Collection[str], revision: int, limit_s: float) -> None:
    """See `EtcdMembers.watch`. Not etcd3gw's own watch: that waits for ever if its member ends or falls silent."""
    deadline, left = time.monotonic() + limit_s, set(keys)
    body = "\n".join(json.dumps({"create_request": {"key": key, "start_revision": revision}}) for key in left)
    try:
        response = client.session.post(client.get_url("/watch"), data=body, stream=True, timeout=(_CONNECT_S, limit_s))
    except requests.ReadTimeout:
        return
    with response:
        try:
            for line in filter(None, response.iter_lines()):
                result = _result(line)
                left -= {event["kv"]["key"] for event in result.get("events", ())}
                # A watch is cancelled if etcd has forgotten the revision.
                if not left or result.get("canceled") or time.monotonic() > deadline:
                    return
        except requests.ConnectionError:
            return  # the member was silent: requests says so with this error once the answer has begun
    raise requests.ConnectionError("The member has ended a watch.")


def _result(line: bytes) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(line)
    if "result" not in said:
        raise requests.HTTPError(line.decode())
    return dict(said["result"])
