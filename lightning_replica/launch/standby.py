"""Processes that have imported what ranks import, and wait to take a lost rank's place."""

import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeAlias

from lightning_replica._compat.packages import chosen
from lightning_replica.control import keys
from lightning_replica.core.machine import is_stopped
from lightning_replica.core.messages import warn
from lightning_replica.core.orphans import born_mortal
from lightning_replica.launch.environment import allocator, hash_seed
from lightning_replica.launch.waiting import search_path
from lightning_replica.stores.interface import Store

Command: TypeAlias = Callable[[int], tuple[Sequence[str], str | None]]
"""The command line and the working directory of a rank."""

# The first entry of `sys.path` is the script's folder from the beginning, as in a rank.
_SEARCH = "import sys; sys.path[0] = {!r} if sys.path[0] == '' else sys.path[0]"
_END_S = 1.0
_MAX_LOST = 3  # standbys that may die while they wait; if more die, no new ones are started


def call(store: Store, modules: Sequence[str]) -> None:
    """Tell the supervisor that now is a good time to start standbys, as ranks are not waiting for a processor.

    Args:
        store: The supervisor's store.
        modules: Names of the modules that a standby is to import.
    """
    store.set(keys.standby_call(store.add(keys.STANDBY_CALLS, 1)), json.dumps(list(modules)))


def imported() -> list[str]:
    """Return the names of imported modules that are installed: unlike the user's own, all processes share these.

    The first is the package of Lightning that this process uses: so a process that imports them all uses the same.
    """
    folders = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("purelib", "platlib", "stdlib")})
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    own = __name__.partition(".")[0]
    found = [
        name
        for name, file in files.items()
        if name != "__main__" and (name.partition(".")[0] == own or (file or "").startswith(folders))
    ]
    return [chosen().pytorch, *sorted(found)]


class Standbys:
    """Keeps ``count`` standbys waiting. All public methods belong to the supervisor's main thread.

    Args:
        command: Returns the command line of a rank.
        count: Number of standbys.
        least: Number of standbys that are kept, whatever the user has chosen, until they become ranks: on a spare node,
            one for each rank.
    """

    def __init__(self, command: Command, count: int, least: int = 0) -> None:
        self._command, self._asked, self._least = command, count, least
        self._connect: Callable[[], Store] | None = None
        self._waiting: list[_Standby] = []
        self._modules: list[str] | None = None  # None until the first call
        self._wanted = False
        self._lost = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="standby-calls", daemon=True)

    def watch(self, connect: Callable[[], Store], changed: Callable[["Standbys"], None]) -> None:
        """Start to listen for calls.

        Args:
            connect: Opens a new connection to the store of the run.
            changed: Called from another thread when `fill` has something to do.
        """
        self._connect, self._changed = connect, changed
        self.keep(self._asked)

    def keep(self, count: int) -> None:
        """Keep ``count`` standbys waiting from the next call on."""
        self._asked = count
        if self._count and self._connect is not None and not self._thread.is_alive():
            self._thread.start()

    @property
    def _count(self) -> int:
        return max(self._asked, self._least)

    def fill(self, restarts_left: int) -> None:
        """Start the standbys that are missing.

        A process dies with the thread that started it, so a thread that lasts has to call this.
        """
        died = [standby for standby in self._waiting if standby.process.poll() is not None]
        self._lost += len(died)
        self._waiting = [standby for standby in self._waiting if standby not in died]
        if not self._wanted or self._modules is None or self._lost > _MAX_LOST:
            return
        useful = max(restarts_left, self._least) if restarts_left else 0  # a node that is replaced counts once
        for _ in range(min(self._count, useful) - len(self._waiting)):
            try:
                standby = _Standby(self._command, self._modules)
            except OSError as error:  # no memory, no process, no room in TMPDIR: a replacement is a new process then
                self._wanted = False
                warn(f"no standby can be started: {error}. Replacements take longer without one.")
                return
            self._waiting.append(standby)
            threading.Thread(target=self._wait, args=(standby,), name="standby", daemon=True).start()

    def take(self, rank: int, environment: dict[str, str]) -> "subprocess.Popen[bytes] | None":
        """Turn a standby into ``rank``, and return its process; None if there is no standby."""
        self._wanted = False  # until the next call: starting a standby now would delay the recovery
        command, cwd = self._command(rank)
        while self._waiting:
            standby = self._waiting.pop(0)
            if standby.become(command, cwd, environment):
                self._least = max(0, self._least - 1)  # a spare that has got ranks is a node like any other
                return standby.process
        return None

    def end(self) -> None:
        """End all standbys."""
        self._over.set()
        if self._thread.is_alive() and self._connect is not None:
            call(self._connect(), [])  # wakes the thread
            self._thread.join(_END_S)  # if the store was lost, calls are counted from 1 again, and it sleeps on
        waiting, self._waiting = self._waiting, []
        for standby in waiting:
            standby.end()

    def _listen(self) -> None:
        if self._connect is None:
            raise RuntimeError("`watch` starts this thread")
        store = self._connect()
        number = 1
        while True:
            modules = json.loads(store.get(keys.standby_call(number)))
            if self._over.is_set():
                return
            if modules:  # else another node ends
                self._modules, self._wanted = modules, True
                self._changed(self)
            number += 1

    def _wait(self, standby: "_Standby") -> None:
        standby.process.wait()
        if standby in self._waiting:
            self._changed(self)


class _Standby:
    """One waiting process."""

    def __init__(self, command: Command, modules: Sequence[str]) -> None:
        line, cwd = command(0)
        # Modules and the order go into files: a pipe may be too small for them, and the supervisor would then wait for
        # a process that still imports.
        self._order = tempfile.TemporaryFile("w+")  # noqa: SIM115
        reader, writer = os.pipe()
        # The standby starts with SIGINT blocked, and unblocks it once it ignores it: so Ctrl-C never ends it.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with tempfile.TemporaryFile("w+") as names:
                json.dump(list(modules), names)
                names.seek(0)
                descriptors = (reader, self._order.fileno(), names.fileno())
                call = f"wait({os.getpid()}, {', '.join(map(str, descriptors))})"
                script = f"from lightning_replica.launch.waiting import wait; {call}"
                self.process = subprocess.Popen(
                    [line[0], "-c", f"{_SEARCH.format(search_path(line, cwd))}; {script}"],
                    pass_fds=descriptors,
                    cwd=cwd,
                    env={**os.environ, **allocator(os.environ), **hash_seed(os.environ)},
                    preexec_fn=born_mortal(),
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            os.close(reader)
        self._begins = os.fdopen(writer, "w")

    def become(self, command: Sequence[str], cwd: str | None, environment: dict[str, str]) -> bool:
        """Make it a rank. Return False if it has died or is stopped."""
        if self.process.poll() is not None:
            return False
        if is_stopped(self.process.pid):
            self.end()
            return False
        order = {"command": list(command), "cwd": cwd, "environment": environment}
        try:
            with self._order:
                json.dump(order, self._order)
            self._begins.write("now")
            self._begins.close()
        except BrokenPipeError:
            return False
        except OSError as error:
            warn(f"a standby cannot take the place of a rank: {error}. A new process does.")
            self.end()
            return False
        return True

    def end(self) -> None:
        """Kill it, and wait until it has ended."""
        self.process.kill()
        self.process.wait()
        self._order.close()
        with suppress(BrokenPipeError):
            self._begins.close()
