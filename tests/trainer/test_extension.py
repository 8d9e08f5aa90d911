"""A tool that takes part in a training of which it is no part."""

import pytest

from lightning_replica import ConfigurationError
from lightning_replica.chaos import experiment
from lightning_replica.core.options import RecoveryOptions
from lightning_replica.trainer.extension import VARIABLE, Nothing, extension


def test_the_environment_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    options = RecoveryOptions(max_tries=7)
    monkeypatch.delenv(VARIABLE, raising=False)
    assert isinstance(extension(), Nothing)
    assert extension().overridden(options) is options
    monkeypatch.setenv(VARIABLE, experiment.__name__)
    assert extension() is experiment


def test_what_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "no_such_module")
    with pytest.raises(ConfigurationError, match=r"LIGHTNING_REPLICA_EXTENSION=no_such_module cannot be imported"):
        extension()
