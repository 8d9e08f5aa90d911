"""``lightning-replica store``: serves a store for `lightning-replica run`, alone on any host."""

import argparse
import signal
import socket
from typing import Any, Final

from lightning_replica.core.messages import say
from lightning_replica.errors import ConfigurationError

_PORT: Final = 29500
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def add_parser(commands: Any) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "store",
        help="serves the store of `run`, on a host that no training takes down",
        description="Serves the store of `lightning-replica run` until it gets SIGINT or SIGTERM. Nodes that have the"
        " same --rdzv-endpoint use it. It serves any number of runs; those at the same time need different --rdzv-id.",
    )
    parser.add_argument("endpoint", metavar="HOST:PORT", help="an address of this host, and a free port")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Serve the store until a signal asks for the end.

    Raises:
        ConfigurationError: If it cannot listen there.
    """
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    from lightning_replica.stores.tcp import serve

    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        host, port = parse_rendezvous_endpoint(options.endpoint, _PORT)
        address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
        store = serve(address, port)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"Cannot serve a store at {options.endpoint}: {error}. Give an address of this host and a free port."
        ) from error
    say(f"serves a store at {address}:{store.port}.")
    say(f"{signal.Signals(signal.sigwait(_SIGNALS)).name}: the store ends.")
    return 0
