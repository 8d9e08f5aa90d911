"""The port at which a supervisor listens as long as it lives.

While the run has its store, connections are closed at once: that they are accepted is all that others want to know. If
the store is lost, the supervisor may serve another one at this port, which all nodes know.
"""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import torch.distributed as dist

from lightning_replica.nodes.membership import Member
from lightning_replica.stores.tcp import listen, serve_at

_PROBE_S: Final = 1.0
_PAUSE_S: Final = 0.1


class Listener:
    """Listens at a free port of an address.

    Args:
        address: IP address of this machine.

    Attributes:
        port: The port.
    """

    def __init__(self, address: str) -> None:
        self._listening, self._address = listen(address), address
        self.port: int = self._listening.getsockname()[1]
        self._on_connection: Callable[[], None] = lambda: None
        self._over = False
        self._thread = threading.Thread(target=self._accept, name="lightning_replica-listener", daemon=True)
        self._thread.start()

    def on_connection(self, do: Callable[[], None]) -> None:
        """Call ``do`` whenever another node has connected. It is called in another thread."""
        self._on_connection = do

    def serve(self) -> dist.TCPStore:
        """Serve a store at this port from now on."""
        self._stop()
        return serve_at(self._listening)

    def close(self) -> None:
        """Listen no more."""
        self._stop()
        self._listening.close()

    def _stop(self) -> None:
        self._over = True
        with suppress(OSError):
            socket.create_connection((self._address, self.port), _PROBE_S).close()  # wakes the thread
        self._thread.join()

    def _accept(self) -> None:
        while not self._over:
            try:
                self._listening.accept()[0].close()
            except OSError:  # for example, this process has too many open files
                time.sleep(_PAUSE_S)
                continue
            self._on_connection()


def is_dead(member: Member) -> bool:
    """Return whether the supervisor of a node has certainly died: its machine refuses connections to its port."""
    try:
        socket.create_connection((member.address, member.port), _PROBE_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:  # silence is no proof: the time-out decides
        return False
    return False
