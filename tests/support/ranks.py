"""Runs a function in N forked ranks that share a store, and returns what each returned."""

import json
import multiprocessing
import random
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.support.forked import context

_DIED = object()


def free_port() -> int:
    """A port that nobody listens on now, and that the system gives to nobody who leaves the choice to it."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60) -> list[Any]:
    """Calls ``function(rank, store, *args)`` in every rank; results must be plain data.

    A rank that dies returns its exit code as ``{"died": code}``, one that raises ``{"raised": text}``.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = []
    for rank in range(world_size):
        reader, writer = multiprocessing.Pipe(duplex=False)
        process = context().Process(target=_call, args=(rank, store.port, writer, function, args))
        process.start()
        writer.close()
        processes.append((process, reader))
    results = [_receive(reader, timeout_s) for _, reader in processes]
    store.set("leave", "1")  # nobody's connections close before everybody is through
    for number, (process, reader) in enumerate(processes):
        process.join(timeout_s)
        if results[number] is _DIED:
            process.kill()
            process.join()
            results[number] = {"died": process.exitcode}
        reader.close()
    return results


def _receive(reader: Any, timeout_s: float) -> Any:
    try:
        return json.loads(reader.recv()) if reader.poll(timeout_s) else _DIED
    except EOFError:
        return _DIED


def _call(rank: int, port: int, writer: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
    try:
        result = function(rank, store, *args)
    except BaseException:
        result = {"raised": traceback.format_exc()}
    writer.send(json.dumps(result))
    store.wait(["leave"])
    if dist.is_initialized():
        dist.destroy_process_group()


def open_world(rank: int, store: Any, world_size: int) -> None:
    """A default gloo group, to which all ranks are connected: whoever goes now, the others have it."""
    dist.init_process_group("gloo", store=dist.PrefixStore("test", store), rank=rank, world_size=world_size)
    meet(rank, store, world_size, "open")


def meet(rank: int, store: Any, world_size: int, name: str) -> None:
    """Waits for all ranks, through the store."""
    store.set(f"{name}/{rank}", "1")
    store.wait([f"{name}/{other}" for other in range(world_size)])
