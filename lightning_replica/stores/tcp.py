"""torch's TCPStore: served on one address only, and reached with errors that say why it cannot be."""

import ctypes
import os
import socket
import sys
from datetime import timedelta
from typing import Final

import torch.distributed as dist

from lightning_replica.stores.tagged import with_tags

_CONNECT: Final = timedelta(seconds=60)
_FOREVER: Final = timedelta(days=3650)
_TRY_S: Final = 5.0  # for one connection
# In seconds. A link that is down for minutes breaks no connection: whether a node is lost is decided elsewhere.
_INTERVALS: Final = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 127}
_KEEP_ALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *((socket.IPPROTO_TCP, getattr(socket, name, 0), value) for name, value in _INTERVALS.items()),
)


def connect(host: str, port: int) -> dist.Store:
    """Open a connection to a store. What is written and read there has tags if this process has a secret."""
    return with_tags(_connect(host, port))


def _connect(host: str, port: int) -> dist.TCPStore:
    store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_CONNECT)
    # Ranks wait for a key in slices only. A request takes long only if the process of the store is stopped (Ctrl-Z),
    # and that process resumes some day. A store that is gone closes the connection.
    store.set_timeout(_FOREVER)
    _keep_alive(port)
    return store


def _keep_alive(port: int) -> None:
    """Have the kernel send something over this process's idle connections to a port.

    Firewalls and NAT forget a connection that is idle for some minutes, and drop without a word what comes later. torch
    does not say which sockets are its own. To set this at other connections to such a port does no harm. An object of
    `socket.socket` would: it makes the connection non-blocking if the script has set a default time-out.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    for name in os.listdir("/proc/self/fd"):
        address, length = ctypes.create_string_buffer(128), ctypes.c_uint32(128)
        if libc.getpeername(int(name), address, ctypes.byref(length)) != 0:
            continue  # it is no socket, is not connected, or was closed meanwhile
        family, peer = int.from_bytes(address.raw[:2], sys.byteorder), int.from_bytes(address.raw[2:4], "big")
        if family in (socket.AF_INET, socket.AF_INET6) and peer == port:
            for level, option, value in _KEEP_ALIVE:
                given = ctypes.c_int(value)
                libc.setsockopt(int(name), level, option, ctypes.byref(given), ctypes.sizeof(given))


def reach(host: str, port: int) -> dist.TCPStore:
    """Open a connection to a store, without tags. Fail at once if no process serves it.

    Raises:
        ConnectionRefusedError: If no process serves it any more.
        OSError: If its host cannot be reached.
        DistNetworkError: If the process that listens there serves no store.
    """
    # torch would try for a minute, and not tell why it cannot connect.
    socket.create_connection((host, port), _TRY_S).close()
    return _connect(host, port)


def serve(address: str, port: int = 0) -> dist.TCPStore:
    """Serve a store that listens on ``address`` only. A store that torch itself opens listens on every interface.

    Use what this returns only to keep the store alive: `connect` opens a connection to it that knows the secret.

    Args:
        address: IP address of this machine.
        port: 0 finds a free one.

    Raises:
        OSError: If it cannot listen at the address and the port.
    """
    with listen(address, port) as listening:
        return serve_at(listening)


def serve_at(listening: socket.socket) -> dist.TCPStore:
    """Serve a store at a socket that listens. The store owns the socket's descriptor from now on."""
    address, bound = listening.getsockname()[:2]
    return dist.TCPStore(address, bound, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def listen(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens at ``address``. See `serve`.

    It listens from the start: with SO_REUSEADDR, two processes could both bind a port at which neither listens.
    """
    listening = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((address, port))
        listening.listen()
    except OSError:
        listening.close()
        raise
    return listening
