"""A real S3 server, moto's, in a process of its own. It can kill a client at any request, or refuse what it asks."""

import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterable
from typing import Any, Literal

Trouble = Literal["killed", "full", "refused"]
_CONTROL = "/-/control"
_REFUSAL = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


class Server:
    """Starts the server, and has this process and those that it starts find it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.bucket"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.settings = {
            "AWS_ENDPOINT_URL": self._process.stdout.readline().strip(),
            "AWS_ACCESS_KEY_ID": "id",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }
        self._numbers = itertools.count()

    def url(self) -> str:
        """The URL of a directory in a bucket of its own."""
        name = f"bucket{next(self._numbers)}"
        request = urllib.request.Request(f"{self.settings['AWS_ENDPOINT_URL']}/{name}", method="PUT")
        urllib.request.urlopen(request).close()
        return f"s3://{name}/deep/run"

    def stop(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def settings() -> dict[str, str]:
    """What a process must have in its environment to find the server."""
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def trouble(what: Trouble, number: int) -> None:
    """Lets something happen to the ``number``-th request from now on that changes the store, counted from 1.

    "killed" kills this process before the store has done anything of it, and when the one before it has been done.
    "full" refuses that one and all that follow but removals, "refused" those too.
    """
    _control({"what": what, "number": number, "process": os.getpid()})


def changes() -> list[str]:
    """The requests that have changed the store since the last `trouble`: method and path."""
    return _control(None)


def _control(rule: dict[str, Any] | None) -> Any:
    request = urllib.request.Request(os.environ["AWS_ENDPOINT_URL"] + _CONTROL, json.dumps(rule).encode())
    with urllib.request.urlopen(request) as response:
        return json.loads(response.read())


Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class _Troubled:
    """Stands before the server."""

    def __init__(self, application: Application) -> None:
        self._application, self._lock = application, threading.Lock()
        self._rule: dict[str, Any] = {}
        self._changes: list[str] = []

    def __call__(self, environ: dict[str, Any], respond: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] == _CONTROL:
            return self._control(environ, respond)
        if environ["REQUEST_METHOD"] in ("GET", "HEAD"):
            return self._application(environ, respond)
        with self._lock:  # one after the other, so that they can be counted
            self._changes.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}")
            what, after = self._rule.get("what"), len(self._changes) - self._rule.get("number", 0)
            if what == "killed" and after == 0:
                os.kill(self._rule["process"], signal.SIGKILL)
                raise ConnectionAbortedError
            if after >= 0 and (what == "refused" or (what == "full" and environ["REQUEST_METHOD"] == "PUT")):
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                respond("403 Forbidden", [("Content-Type", "application/xml")])
                return [_REFUSAL]
            return list(self._application(environ, respond))

    def _control(self, environ: dict[str, Any], respond: Callable[..., Any]) -> Iterable[bytes]:
        rule = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
        with self._lock:
            told = json.dumps(self._changes).encode()
            if rule is not None:
                self._rule, self._changes = rule, []
        respond("200 OK", [("Content-Type", "application/json")])
        return [told]


def _serve() -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    application = _Troubled(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, application, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    sys.stdin.read()  # until whoever has started it is gone
    os._exit(0)


if __name__ == "__main__":
    _serve()
