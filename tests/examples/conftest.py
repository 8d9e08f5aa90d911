"""Tests of examples/clusters get a cluster with or without the real `lightning-replica`."""

from pathlib import Path

import pytest

from tests.examples.clusters import STAND_IN_RUN, STAND_INS, Cluster


@pytest.fixture
def simulated(tmp_path: Path) -> Cluster:
    """A cluster on which nothing trains."""
    return Cluster(tmp_path, {**STAND_INS, "lightning-replica": STAND_IN_RUN})


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """A cluster on which the real `lightning-replica` runs."""
    return Cluster(tmp_path, STAND_INS)
