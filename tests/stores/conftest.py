"""Each file of tests that asks for one gets a real etcd of three members of its own."""

import uuid
from collections.abc import Callable, Iterator

import pytest

from lightning_replica.stores.address import EtcdAddress
from tests.stores.etcd_requests import Requests
from tests.support.etcd import Member
from tests.support.etcd import etcd as start_etcd


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Member]]:
    with start_etcd(tmp_path_factory.mktemp("etcd")) as members:
        yield members


@pytest.fixture(scope="module")
def address(members: list[Member]) -> EtcdAddress:
    return EtcdAddress(tuple(member.endpoint for member in members))


@pytest.fixture
def key() -> Callable[[str], str]:
    """Names that no other test uses."""
    own = uuid.uuid4().hex
    return lambda name: f"{own}/{name}"


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    return Requests(monkeypatch)
