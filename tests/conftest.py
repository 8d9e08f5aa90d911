"""What the whole run has to say, and what takes long to start."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import world
from tests.support.bucket import Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """An S3 server that all who ask for it share."""
    server = Server()
    yield server
    server.stop()


@pytest.fixture
def bucket(server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty directory there; the environment says where that is."""
    for name, value in server.settings.items():
        monkeypatch.setenv(name, value)
    return server.url()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Ranks that hung though they were not meant to: recovered from, or their test has failed; not to be overlooked."""
    if world.HUNG:
        terminalreporter.section(f"{len(world.HUNG)} lines about ranks that hung by themselves")
        for line in world.HUNG:
            terminalreporter.line(line)
