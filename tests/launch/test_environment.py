"""What a rank finds in its environment."""

import os
import sys
from pathlib import Path

import pytest

from lightning_replica.launch.environment import RankEnvironment, allocator, hash_seed
from lightning_replica.launch.node_context import NodeContext
from lightning_replica.launch.standby import _Standby
from lightning_replica.stores.address import StoreAddress

OFF = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, OFF),
        ({"GLIBC_TUNABLES": ""}, OFF),
        (
            {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"},
            {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2:glibc.malloc.tcache_count=0"},
        ),
        ({"GLIBC_TUNABLES": "glibc.malloc.tcache_count=7"}, {}),
    ],
)
def test_the_caches_of_malloc_are_off_unless_the_user_has_set_them(
    given: dict[str, str], expected: dict[str, str]
) -> None:
    assert allocator(given) == expected


def test_a_rank() -> None:
    store = StoreAddress("127.0.0.1", 1)
    variables = RankEnvironment(store, os.getpid(), 0).variables(0, NodeContext(2, 2, store), {"GLIBC_TUNABLES": "a=1"})
    assert variables["GLIBC_TUNABLES"] == "a=1:glibc.malloc.tcache_count=0"
    assert variables["PYTHONHASHSEED"] == "0"


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, {"PYTHONHASHSEED": "0"}), ({"PYTHONHASHSEED": ""}, {"PYTHONHASHSEED": "0"}), ({"PYTHONHASHSEED": "7"}, {})],
)
def test_sets_of_strings_have_one_order_in_all_processes(given: dict[str, str], expected: dict[str, str]) -> None:
    assert hash_seed(given) == expected


def test_a_standby(monkeypatch: pytest.MonkeyPatch) -> None:
    """glibc reads it when a process starts: a standby has it before it becomes a rank."""
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    standby = _Standby(lambda _: ([sys.executable, "train.py"], None), [])
    try:
        started_with = Path(f"/proc/{standby.process.pid}/environ").read_bytes().decode().split("\0")
    finally:
        standby.end()
    assert "GLIBC_TUNABLES=glibc.malloc.tcache_count=0" in started_with
