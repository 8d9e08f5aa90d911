"""A standby: a process that imports what ranks import, waits, and becomes a rank.

It reads from a file which modules to import. Once a pipe says so, it reads from another file, as one JSON object, which
command line to run. Until then it opens nothing and has no rank. The script that it runs finds what a new process
finds, except for `sys.modules`.
"""

import gc
import importlib
import importlib.machinery
import importlib.util
import io
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_replica.core.orphans import die_with
from lightning_replica.launch import rank_logs
from lightning_replica.launch.environment import rank_here
from lightning_replica.launch.rank import enter

log = logging.getLogger(__name__)


def wait(supervisor: int, begins: int, order: int, modules: int) -> None:
    """Wait for an order, then run a rank's script to its end. End this process if the supervisor ends.

    Args:
        supervisor: Process id of the supervisor.
        begins: Descriptor of a pipe, from which anything is read once there is an order.
        order: Descriptor of the file that then holds the order: the arguments of `become`.
        modules: Descriptor to read names of modules from.
    """
    for signum in (signal.SIGINT, signal.SIGHUP):  # from a terminal; the supervisor ends standbys
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    die_with(supervisor)
    with os.fdopen(modules) as names, _silence():
        warm_up(json.load(names))
    # A full garbage collection in a process that has imported everything takes some tenths of a second, and the first
    # allocations of the script would start one. The objects that exist now stay, so they are frozen.
    gc.collect()
    gc.freeze()
    with os.fdopen(begins) as pipe, os.fdopen(order) as file:
        begin = pipe.read()
        file.seek(0)  # the supervisor has written at this offset
        text = file.read()
    if begin:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        become(**json.loads(text))


def warm_up(modules: Sequence[str]) -> None:
    """Import modules. A module that cannot be imported here raises its error in the script."""
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            log.debug("standby: %s is not imported: %s", name, error)


@contextmanager
def _silence() -> Iterator[None]:
    """Hide what imports print, as ranks have printed it. Redirect descriptors, as handlers may keep `sys.stderr`."""
    sys.stdout.flush()
    saved = [os.dup(descriptor) for descriptor in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    try:
        yield
    finally:
        sys.stdout.flush()
        for descriptor, original in zip((1, 2), saved, strict=True):
            os.dup2(original, descriptor)
            os.close(original)
        os.close(nowhere)


def become(command: Sequence[str], cwd: str | None, environment: dict[str, str]) -> None:
    """Run ``python [-m] script arguments`` as the interpreter would.

    Args:
        command: The command line, with the interpreter in front.
        cwd: Working directory; None keeps this one.
        environment: The complete environment.
    """
    os.environ.clear()
    os.environ.update(environment)
    if cwd is not None:
        os.chdir(cwd)
    rank_logs.redirect()
    enter()
    _set_rank(rank_here())
    if command[1] == "-m":
        _run_module(command[2], command[3:])
    else:
        _run_script(command[1], command[2:])


def search_path(command: Sequence[str], cwd: str | None) -> str:
    """Return the first entry of ``sys.path`` under a command line."""
    if command[1] == "-m":
        return os.path.abspath(cwd or os.getcwd())
    return os.path.dirname(os.path.realpath(os.path.join(cwd or "", command[1])))


def _set_rank(rank: int) -> None:
    """Set Lightning's rank, which Lightning reads from the environment only when it is imported."""
    from lightning_replica._compat.lightning_names import rank_zero_only

    rank_zero_only.rank = rank  # type: ignore[attr-defined]


def _run_module(name: str, arguments: Sequence[str]) -> None:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None or spec.origin is None:
        raise ImportError(f"No module named {name}")
    loader: Any = spec.loader
    sys.argv[:] = [spec.origin, *arguments]
    names = {"__spec__": spec, "__package__": spec.parent, "__loader__": loader, "__cached__": spec.cached}
    _run(loader.get_code(spec.name), spec.origin, names)


def _run_script(path: str, arguments: Sequence[str]) -> None:
    sys.argv[:] = [path, *arguments]
    with io.open_code(os.path.abspath(path)) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    _run(code, path, {"__spec__": None, "__package__": None, "__loader__": loader, "__cached__": None})


def _run(code: Any, file: str, names: dict[str, Any]) -> None:
    """Run in the real `__main__`, so that this process and DataLoader workers find what is pickled there."""
    namespace = vars(sys.modules["__main__"])
    begins_with = {"__name__": "__main__", "__doc__": None, "__builtins__": namespace["__builtins__"]}
    if "__annotations__" in namespace:  # up to Python 3.13
        begins_with["__annotations__"] = {}
    namespace.clear()
    namespace.update(begins_with, __file__=file, **names)
    exec(code, namespace)
