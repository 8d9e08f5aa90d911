"""A store in a process of its own, which a test can kill."""

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from threading import Event
from typing import Any

from lightning_replica.stores.tcp import serve
from tests.support.forked import context


@contextmanager
def store_process() -> Iterator[tuple[int, ForkProcess]]:
    """The port of a store on loopback, and the process that serves it."""
    reader, writer = context().Pipe(duplex=False)
    process: Any = context().Process(target=_serve, args=(writer,), daemon=True)
    process.start()
    try:
        yield int(reader.recv()), process
    finally:
        process.kill()
        process.join()
        reader.close()
        writer.close()


def _serve(writer: Connection) -> None:
    store = serve("127.0.0.1")
    writer.send(store.port)
    Event().wait()
