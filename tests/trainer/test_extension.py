"""A tool that takes part in a training of which it is no part."""

from pathlib import Path

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


def test_where_an_experiment_resumes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`verify` begins anew each time, whatever the script has chosen, or at the checkpoint of the run before."""
    assert (Nothing().resume("auto"), Nothing().resume(None)) == ("auto", None)
    for given, chosen, expected in (
        (experiment.Experiment("x"), "auto", "auto"),
        (experiment.Experiment("x"), None, None),
        (experiment.Experiment("x", anew=True), "auto", None),
        (experiment.Experiment("x", anew=True, resumes_from="there"), "auto", "there"),
    ):
        given.write(tmp_path / "experiment.json")
        monkeypatch.setenv(experiment.VARIABLE, str(tmp_path / "experiment.json"))
        assert experiment.resume(chosen) == expected


def test_what_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "no_such_module")
    with pytest.raises(ConfigurationError, match=r"LIGHTNING_REPLICA_EXTENSION=no_such_module cannot be imported"):
        extension()
