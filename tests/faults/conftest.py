import pytest

from tests.support import world
from tests.support.job import Case


@pytest.fixture(scope="session")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> world.Outcome:
    """The oracle: the same training, left alone."""
    outcome = world.run(Case(), tmp_path_factory.mktemp("untouched"))
    assert outcome.code == 0, outcome.logs
    assert not outcome.said
    assert all(len(rank) == 12 for rank in outcome.batches)
    return outcome
