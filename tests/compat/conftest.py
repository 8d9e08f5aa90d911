"""What several tests of versions and packages use."""

from collections.abc import Iterator

import pytest

from tests.support.bare_python import BarePython, bare_python


@pytest.fixture(scope="package")
def python() -> Iterator[BarePython]:
    """A Python that has imported torch, and nothing of Lightning."""
    with bare_python() as python:
        yield python
