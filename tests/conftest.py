"""What the whole run has to say, and what takes long to start."""

import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests import tiers
from tests.support import world
from tests.support.bucket import Server
from tests.support.job import Case
from tests.support.tidy import strewn

# A test under load is not a slow test: what takes how long is measured in benchmarks/.
settings.register_profile("repository", deadline=None)
settings.load_profile("repository")

# torch asks the DNS for the name of each peer that it connects to. Where an answer is lost, that takes five seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1")

ROOT = Path(__file__).parents[1]
BEFORE, LEFT = pytest.StashKey[set[str]](), pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="run the quick tier only (tests/tiers.py)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--quick"):
        return
    unknown = [] if config.args_source is pytest.Config.ArgsSource.ARGS else tiers.unknown([i.nodeid for i in items])
    if unknown:
        raise pytest.UsageError(f"tests/tiers.py names tests that do not exist: {', '.join(unknown)}")
    kept = [item for item in items if tiers.is_quick(item.nodeid)]
    config.hook.pytest_deselected(items=[item for item in items if not tiers.is_quick(item.nodeid)])
    items[:] = kept


def pytest_sessionstart(session: pytest.Session) -> None:
    session.stash[BEFORE] = strewn(ROOT)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell; processes would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup, likewise; this process is to outlive it
        signal.signal(signal.SIGHUP, lambda *_: None)
    tests = os.getpid()
    # Tests leave process groups in reference cycles, as failures do. A child that collects these hangs or crashes. A
    # child of a rank is protected by the library alone (tests/groups/test_forks.py).
    os.register_at_fork(after_in_child=lambda: gc.freeze() if os.getppid() == tests else None)


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Fails a run that leaves files in the repository: a test must write somewhere else."""
    before = session.stash.get(BEFORE, set[str]())
    left = sorted(strewn(ROOT) - before)
    if left and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    session.config.stash[LEFT] = left
    if hasattr(session.config, "workeroutput"):  # of pytest-xdist
        session.config.workeroutput["hung"] = world.HUNG
    return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Takes from a worker of pytest-xdist what only it knows."""
    world.HUNG.extend(getattr(node, "workeroutput", {}).get("hung", []))


@pytest.fixture(scope="session", autouse=True)
def _temporary_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What killed processes leave in the directory for temporary files goes with pytest's own directories."""
    before, os.environ["TMPDIR"] = os.environ.get("TMPDIR"), str(tmp_path_factory.mktemp("tmp"))
    tempfile.tempdir = None
    yield
    tempfile.tempdir = None
    if before is None:
        del os.environ["TMPDIR"]
    else:
        os.environ["TMPDIR"] = before


@pytest.fixture(scope="session")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> world.Outcome:
    """The oracle: the training of `tests.support.job` on four ranks, left alone."""
    outcome = _left_alone(Case(), tmp_path_factory.mktemp("untouched"))
    assert all(len(rank) == 12 for rank in outcome.batches)
    return outcome


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> world.Outcome:
    """The same on two ranks."""
    return _left_alone(Case(devices=2), tmp_path_factory.mktemp("pair"))


def _left_alone(case: Case, out: Path) -> world.Outcome:
    outcome = world.run(case, out)
    assert (outcome.code, outcome.said) == (0, []), outcome.logs
    return outcome


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


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Files that were left behind; and ranks that hung though they were not meant to: recovered from, or their test
    has failed; not to be overlooked."""
    if config.stash.get(LEFT, []):
        terminalreporter.section("The run has left files in the repository", red=True)
        for name in config.stash[LEFT]:
            terminalreporter.line(name)
    if world.HUNG:
        terminalreporter.section(f"{len(world.HUNG)} lines about ranks that hung by themselves")
        for line in world.HUNG:
            terminalreporter.line(line)
