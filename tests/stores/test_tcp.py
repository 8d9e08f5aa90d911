"""Connections to a store: what the kernel does with them while they are idle."""

import os
import socket
from collections.abc import Iterator

from lightning_replica.stores.tcp import connect, serve


def connections_to(port: int) -> Iterator[socket.socket]:
    """Copies of this process's sockets that are connected to a port."""
    for name in os.listdir("/proc/self/fd"):
        try:
            copy = os.dup(int(name))
        except OSError:
            continue
        try:
            found = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            continue
        with found:
            try:
                if found.getpeername()[1] == port:
                    yield found
            except (OSError, IndexError):
                pass


def test_they_are_kept_alive() -> None:
    store = serve("127.0.0.1")
    connection = connect("127.0.0.1", store.port)
    connection.set("key", "value")
    kept = [found.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) for found in connections_to(store.port)]
    assert kept
    assert all(kept)
    idle = [found.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) for found in connections_to(store.port)]
    assert set(idle) == {3}


def test_other_sockets_stay_as_they_are() -> None:
    """Also where the script has set a default time-out, as before downloads: new objects make a socket non-blocking."""
    one, other = socket.socketpair()
    with one, other:
        socket.setdefaulttimeout(5)
        try:
            store = serve("127.0.0.1")
            connection = connect("127.0.0.1", store.port)
            assert os.get_blocking(one.fileno())
            connection.set("key", "value")
            assert connection.get("key") == b"value"
        finally:
            socket.setdefaulttimeout(None)
        assert not one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
