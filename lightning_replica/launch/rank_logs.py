"""Files for the output of ranks, as torchrun's ``--log-dir``, ``--redirects`` and ``--tee`` make them.

    <log-dir>/<name of the run>/attempt_<generation>/<local rank>/stdout.log
                                                                  stderr.log

A rank's process writes to its files itself, so they miss nothing, whatever becomes of the supervisor. What is shown on
the console too is read from there.
"""

import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TextIO

from lightning_replica.core.messages import warn

STREAMS: Final = {"stdout": (1, "LIGHTNING_REPLICA_STDOUT"), "stderr": (2, "LIGHTNING_REPLICA_STDERR")}
"""For each stream of a rank, its descriptor, and the variable that names its file."""

_POLL_S: Final = 0.1
_ENDS_S: Final = 10.0


@dataclass(frozen=True)
class RankLogs:
    """Which streams of which ranks go to files, and which of these are shown too.

    Attributes:
        directory: Where the files are.
        redirects: For each local rank, 1 for stdout, 2 for stderr, 3 for both; a local rank that is not there has 0.
        tee: The same for the streams that are written to files and shown.
    """

    directory: Path
    redirects: Mapping[int, int]
    tee: Mapping[int, int]
    _over: threading.Event = field(default_factory=threading.Event)
    _shown: list[threading.Thread] = field(default_factory=list)

    def open(self, rank: int, local_rank: int, generation: int, folder: str) -> dict[str, str]:
        """Prepare the files of a rank's process, and begin to show what it writes there.

        Args:
            rank: The rank.
            local_rank: Its number on this node, by which `redirects` and `tee` choose.
            generation: The generation in which the process is started.
            folder: Name of the folder of its files.

        Returns:
            The environment variables that name the files.

        Raises:
            OSError: If the files cannot be written.
        """
        shown = self.tee.get(local_rank, 0)
        written = self.redirects.get(local_rank, 0) | shown
        variables = {}
        for name, (flag, variable) in STREAMS.items():
            if written & flag:
                path = self.directory / f"attempt_{generation}" / folder / f"{name}.log"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
                variables[variable] = str(path)
                if shown & flag:
                    self._show(path, rank, getattr(sys, name))
        return variables

    def close(self) -> None:
        """Show what is still to be shown. The ranks have ended."""
        self._over.set()
        for thread in self._shown:
            thread.join(_ENDS_S)

    def _show(self, path: Path, rank: int, to: TextIO) -> None:
        thread = threading.Thread(target=_follow, args=(path, f"[rank {rank}] ", to, self._over), daemon=True)
        self._shown.append(thread)
        thread.start()


def _follow(path: Path, prefix: str, to: TextIO, over: threading.Event) -> None:
    with path.open(errors="replace", newline="\n") as file:
        line, ends = "", False
        while not ends:
            ends = over.wait(_POLL_S)  # and then there is no more to come
            for part in file:
                line += part
                if line.endswith("\n"):
                    to.write(prefix + line)
                    line = ""
            to.flush()
        if line:
            to.write(f"{prefix}{line}\n")
            to.flush()


def redirect() -> None:
    """Write this process's output to the files that its environment names. Nothing is changed for other streams."""
    for descriptor, variable in STREAMS.values():
        if variable in os.environ:
            try:
                file = os.open(os.environ[variable], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            except OSError as error:
                warn(f"this rank's output goes to no file: {error}.")
                continue
            os.dup2(file, descriptor)
            os.close(file)
