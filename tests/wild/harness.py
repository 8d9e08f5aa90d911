"""Runs a script of somebody else's as its user would: ``python script.py``."""

import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.forked_python import ForkedPython
from tests.wild.kill import Kill
from tests.wild.outcome import Outcome

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Script:
    """A script and how it is started.

    Attributes:
        path: Relative to this folder.
        arguments: Of its command line; ``{strategy}`` stands for the strategy.
        prepare: Puts what the script finds into its working directory.
        terminal: Whether it writes to a terminal.
        packages: Directories, named by environment variables, with packages that only this script sees.
        forked: Whether it is forked from a process that has imported Lightning; not if it uses `pytorch_lightning`.
        ddp: Pattern of what need not be as under DDP.
        prefix: What stands before the command.
        limit_s: It is ended after this time.
        checkpoints: Whether its checkpoints can be read in this process.
        varies: Pattern of what differs from run to run even under DDP: times.
    """

    path: str
    arguments: tuple[str, ...] = ()
    prepare: Callable[[Path], object] = field(default=lambda _: None, repr=False)
    terminal: bool = False
    packages: tuple[str, ...] = ()
    forked: bool = True
    ddp: str = ""
    varies: str = ""
    checkpoints: bool = True
    prefix: tuple[str, ...] = ()
    limit_s: float = 200

    def run(self, strategy: str, out: Path, kill: Kill | None = None) -> Outcome:
        """Runs the script to its end, in a working directory of its own.

        Args:
            strategy: "ddp" or "replica_zero".
            out: Where everything goes.
            kill: What befalls it.
        """
        work = out / "work"
        work.mkdir(parents=True)
        self.prepare(work)
        line = [
            *self.prefix,
            sys.executable,
            str(HERE / self.path),
            *(a.format(strategy=strategy) for a in self.arguments),
        ]
        with Output(out / "output", self.terminal) as output:
            process = self._start(line, work, self._environment(strategy, out), output.name)
            late = threading.Timer(self.limit_s, os.killpg, (process.pid, signal.SIGKILL))
            late.start()
            try:
                killed = kill is None or kill.carry_out(out, lambda: process.poll() is not None)
                process.wait()
            finally:
                late.cancel()
                with suppress(ProcessLookupError):  # whoever is left of it
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        text = (out / "output").read_text(errors="replace")
        assert killed, f"the run ended before {kill}\n{text}"
        assert process.returncode is not None
        return Outcome.read(process.returncode, out, work, text, checkpoints=self.checkpoints)

    def _start(
        self, line: list[str], work: Path, environment: dict[str, str], output: str
    ) -> "ForkedPython | subprocess.Popen[bytes]":
        if self.forked:
            return ForkedPython(line, str(work), environment, output)
        with open(output, "wb") as file:
            return subprocess.Popen(
                line, cwd=work, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def _environment(self, strategy: str, out: Path) -> dict[str, str]:
        paths = [str(HERE / "watcher"), str(HERE.parents[1]), *(os.environ[name] for name in self.packages)]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "WILD_STRATEGY": strategy,
            "WILD_OUT": str(out),
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            "HF_HUB_OFFLINE": "1",
            "WANDB_MODE": "offline",
            "WANDB_SILENT": "true",
            "MLFLOW_ALLOW_FILE_STORE": "true",
            "TERM": "xterm",
            "COLUMNS": "120",
        }


class Output:
    """Where a run writes: a file, or a terminal whose text goes to that file."""

    def __init__(self, path: Path, terminal: bool) -> None:
        self._path, self._terminal = path, terminal
        self.name = str(path)

    def __enter__(self) -> "Output":
        if self._terminal:
            read, self._write = pty.openpty()
            self.name = os.ttyname(self._write)
            self._reader = threading.Thread(target=_copy, args=(read, self._path))
            self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal:
            os.close(self._write)
            self._reader.join()


def _copy(terminal: int, path: Path) -> None:
    """Copies until everybody who could write has gone; a terminal says so with an error."""
    with os.fdopen(terminal, "rb", buffering=0) as source, path.open("wb") as target, suppress(OSError):
        while data := source.read(65536):
            target.write(data)
