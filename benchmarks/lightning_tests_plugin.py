"""pytest plugin that runs Lightning's own tests with a different strategy.

``LIGHTNING_TESTS_STRATEGY`` is the strategy ("ddp", "replica_zero", or "replica_zero_off" for the latter with
``recovery=False``); if it is not set, nothing is replaced. ``LIGHTNING_TESTS_OUT`` is the file that gets a line of JSON
for every test. The plugin replaces a Trainer's strategy if the Trainer has one device and the test leaves the strategy
to Lightning or asks for "ddp". This process is then the only rank, as if a launcher had started it.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.trainer.connectors import accelerator_connector

from lightning_replica import ReplicaZeroStrategy
from lightning_replica.launch import rank
from lightning_replica.launch.environment import RankEnvironment
from lightning_replica.launch.node_context import LOOPBACK, NodeContext
from lightning_replica.stores.address import StoreAddress
from lightning_replica.stores.tcp import serve
from lightning_replica.trainer import session

STRATEGY = os.environ.get("LIGHTNING_TESTS_STRATEGY", "")
OUT = Path(os.environ["LIGHTNING_TESTS_OUT"])
OURS = STRATEGY.startswith("replica_zero")
_PLAIN = ("auto", "ddp", "ddp_find_unused_parameters_true")
_TRAINERS: list[str] = []  # what was done with the trainers of the current test


def _replace() -> None:
    """Make every Trainer choose its strategy as described above."""
    connector = accelerator_connector._AcceleratorConnector
    init = connector.__init__

    def chosen(self: Any, *args: Any, **kwargs: Any) -> None:
        applies = _applies(kwargs)
        if applies and STRATEGY:
            off = STRATEGY == "replica_zero_off"
            kwargs["strategy"] = ReplicaZeroStrategy(recovery=False) if off else STRATEGY
        _TRAINERS.append("applies" if applies else "left")
        init(self, *args, **kwargs)

    connector.__init__ = chosen  # type: ignore[method-assign]


def _applies(arguments: dict[str, Any]) -> bool:
    """Return whether the strategy in these arguments can be replaced; skip a test that needs several ranks."""
    devices = arguments.get("devices", "auto")
    if isinstance(devices, int) and devices > 1:
        pytest.skip("needs several ranks")
    one = devices in (1, "1", "auto", [0])
    on_cpu = arguments.get("accelerator", "auto") in ("auto", "cpu")
    asked = arguments.get("strategy", "auto")
    return isinstance(asked, str) and asked in _PLAIN and one and on_cpu and arguments.get("num_nodes", 1) in (1, "1")


@pytest.fixture(autouse=True)
def a_world_of_one(
    restore_env_variables: None, teardown_process_group: None, thread_police_duuu_daaa_duuu_daaa: None
) -> Iterator[None]:
    """Make the process of each test the only rank of a new world."""
    _TRAINERS.clear()
    if OURS:
        store = serve(LOOPBACK)
        os.environ.update(
            RankEnvironment(StoreAddress(LOOPBACK, store.port), os.getppid(), 0).variables(
                0, NodeContext.alone(1, store.port), {}
            )
        )
    elif STRATEGY:
        os.environ.update(LOCAL_RANK="0", NODE_RANK="0", WORLD_SIZE="1")
    before, hook = dict(os.environ), sys.excepthook
    yield
    if OURS:
        rank._entered.clear()  # the next test belongs to another world
        sys.excepthook = hook
        if session._current is not None:
            session._current.close()
            session._current = None
        for name in [name for name in os.environ if name.startswith(("LIGHTNING_REPLICA_", "GLOO_"))]:
            if name in before:
                del os.environ[name]


def pytest_configure(config: pytest.Config) -> None:
    """Replace the strategies."""
    _replace()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep only the tests that apply according to an earlier run, if ``LIGHTNING_TESTS_ONLY`` names its file."""
    if "LIGHTNING_TESTS_ONLY" in os.environ:
        lines = map(json.loads, Path(os.environ["LIGHTNING_TESTS_ONLY"]).read_text().splitlines())
        wanted = {line["test"] for line in lines if line["outcome"] == "passed" and "applies" in line["trainers"]}
        items[:] = [item for item in items if item.nodeid in wanted]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
    """Record how a test has ended: its call, or a failure in its set-up or clean-up."""
    result = yield
    report = result.get_result()  # type: ignore[attr-defined]
    if report.when == "call" or report.outcome != "passed":
        text = "" if report.passed else str(report.longrepr)
        line = {
            "test": item.nodeid,
            "when": report.when,
            "outcome": "xfailed" if hasattr(report, "wasxfail") else report.outcome,
            "trainers": sorted(set(_TRAINERS)),
            "error": text[-6000:],
        }
        with OUT.open("a") as file:
            file.write(json.dumps(line) + "\n")
