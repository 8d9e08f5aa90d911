"""A pytest plugin that runs torch's and FairScale's own tests, as they are, against the adapters.

It replaces the optimizer before the tests are imported, forks their ranks instead of spawning them, and lifts the
decorators that skip a test where there is no GPU if the test itself would run on CPUs. `python -m tests.upstream.run`
uses it.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal import common_distributed

from tests.support.doubles import put
from tests.upstream import adapters

SUBJECT = "LIGHTNING_REPLICA_UPSTREAM_SUBJECT"  # "replica", or "own" for what the tests were written for
OUT = "LIGHTNING_REPLICA_UPSTREAM_OUT"
RANKS = 4  # of the tests that take as many as there are devices


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    _prepare_torch()
    _prepare_fairscale()


def _prepare_torch() -> None:
    base: Any = common_distributed.DistributedTestBase
    base._spawn_processes = _fork_processes
    torch.cpu.device_count = lambda: RANKS
    torch.cuda.device_count = lambda: 0  # asked by tests that do not ask whether there is any
    common: Any = common_distributed
    common.skip_if_no_gpu = lambda test: test  # asks for GPUs, but the tests train on ``self.device``
    common.requires_accelerator_dist_backend = lambda backends=None: lambda test: test
    if os.environ[SUBJECT] == "replica":
        import torch.distributed.optim as of_torch

        put(of_torch, "ZeroRedundancyOptimizer", adapters.AsZeroRedundancyOptimizer)


def _fork_processes(self: Any) -> None:
    self._start_processes(torch.multiprocessing.get_context("fork").Process)


def _prepare_fairscale() -> None:
    try:
        import fairscale.fair_dev.testing.testing as helpers
        import fairscale.optim
    except ImportError:  # only FairScale's own tests need it
        return
    helpers.skip_if_py39_no_cuda = lambda test: test  # a test that hung with old versions of torch
    put(torch.multiprocessing, "spawn", adapters.forked)
    if os.environ[SUBJECT] == "replica":
        fairscale.optim.OSS = adapters.AsOSS


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Writes a line for every test, and one more if its set-up or tear-down has failed."""
    if report.when == "call" or report.outcome != "passed":
        line = {"test": name_of(report.nodeid), "outcome": report.outcome, "error": report.longreprtext}
        with Path(os.environ[OUT]).open("a") as file:
            file.write(json.dumps(line) + "\n")


def name_of(nodeid: str) -> str:
    """``TestClass::test`` or ``test``, without the path."""
    return nodeid.split("::", 1)[1]
