"""``python script.py`` where torch is imported already, but neither Lightning nor this package.

For scripts that import these: of the seconds that it takes, torch and torchmetrics need four fifths.
"""

import json
import os
import runpy
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LIMIT_S = 120
PRELOADED = ("torch", "torch._dynamo", "torch.utils.tensorboard", "torchmetrics", "rich.progress", "fsspec")


class BarePython:
    """Runs one script after the other, each in a process forked from one that has imported `PRELOADED`."""

    def __init__(self, server: "subprocess.Popen[str]") -> None:
        self._server = server

    def run(self, script: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
        """Runs a script to its end. Standard output and error are read separately."""
        outputs = [script.with_suffix(f".{name}") for name in ("out", "err")]
        request = [str(script), {**os.environ, **variables}, *map(str, outputs)]
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps(request), file=self._server.stdin, flush=True)
        code = int(self._server.stdout.readline())
        return subprocess.CompletedProcess([str(script)], code, *(path.read_text() for path in outputs))


@contextmanager
def bare_python() -> Iterator[BarePython]:
    """Starts the process that is forked."""
    server = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with server:
        yield BarePython(server)
        assert server.stdin is not None
        server.stdin.close()
    assert server.returncode == 0


def _become(script: str, environment: dict[str, str], *outputs: str) -> None:
    for descriptor, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = sys.orig_argv[1:] = [script]
    sys.path[0] = str(Path(script).parent)
    del sys.modules["__mp_main__"]  # what multiprocessing calls the `__main__` in which it was first imported
    warnings.simplefilter("ignore")
    signal.alarm(LIMIT_S)  # ends a script that waits for something
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _serve() -> None:
    for name in PRELOADED:
        __import__(name)
    loaded = {name.partition(".")[0] for name in sys.modules}
    assert not loaded & {"lightning", "pytorch_lightning", "lightning_fabric", "lightning_replica", "tests"}
    for request in sys.stdin:
        script, environment, *outputs = json.loads(request)
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            _become(script, environment, *outputs)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    _serve()
