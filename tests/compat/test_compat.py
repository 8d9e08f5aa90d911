"""Private names still exist, and the places of Lightning that are followed line by line still read the same."""

import ast
import hashlib
import importlib
import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_replica._compat import lightning as compat
from lightning_replica._compat import lightning_names as names
from lightning_replica._compat import torch as torch_compat

# What is followed, by the digest of its code, and the versions of Lightning in which it reads like that. If one
# changes: read what changed, follow it in trainer/fit_loop.py or state/host_state.py, then put the new digest here.
FOLLOWED: dict[str, tuple[Callable[..., Any], dict[str, str]]] = {
    "the loop of _FitLoop.run (ReplicaFitLoop._epochs)": (names._FitLoop.run, {"27084dd68a72": "2.6.0 to 2.6.6"}),
    "the loop of _TrainingEpochLoop.run (ReplicaEpochLoop.run)": (
        names._TrainingEpochLoop.run,
        {"071898f47078": "2.6.0 to 2.6.6"},
    ),
    "a batch and its tail (ReplicaEpochLoop._tail, LightningHostState._transfer)": (
        names._TrainingEpochLoop.advance,
        {"0dc6e33eab7f": "2.6.0 to 2.6.6"},
    ),
    "the end of an epoch (ReplicaFitLoop._end_epoch)": (
        names._FitLoop.on_advance_end,
        {"7f5b7ac45342": "2.6.0 to 2.6.6"},
    ),
    "loaders of training (ReplicaFitLoop._load_combined_loader_states)": (
        names._FitLoop.setup_data,
        {"40a74e2417fc": "2.6.4 to 2.6.6", "6e2b36813ef6": "2.6.0, 2.6.1: another condition of an error"},
    ),
    "loaders in validations (ReplicaValidationLoop.setup_data)": (
        names._EvaluationLoop.setup_data,
        {"f75a901e1bf6": "2.6.0 to 2.6.6"},
    ),
    "the step of automatic optimization (ReplicaEpochLoop._tail)": (
        names._AutomaticOptimization._optimizer_step,
        {"77db64bcafed": "2.6.0 to 2.6.6"},
    ),
}


def digest(function: Callable[..., Any]) -> str:
    """Of the code, not of comments, docstrings and white space; the same under each version of Python."""
    source = textwrap.dedent(inspect.getsource(function))
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
            for number in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1):
                lines[number - 1] = ""
    code = ["".join(line.partition("#")[0].split()) for line in lines]
    return hashlib.sha256("".join(code).encode()).hexdigest()[:12]


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_is_followed_reads_the_same(name: str) -> None:
    function, known = FOLLOWED[name]
    assert digest(function) in known, f"{name} reads otherwise in Lightning {L.__version__} than in {known}"


def test_the_names_in_the_metadata_of_a_checkpoint_exist() -> None:
    for module, inside in torch_compat._DCP_METADATA.items():
        assert all(hasattr(importlib.import_module(module), name) for name in inside), module


def quiet(**options: Any) -> L.Trainer:
    return L.Trainer(
        max_epochs=2,
        limit_val_batches=1,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def test_loops_are_saved_as_they_save_themselves() -> None:
    module = BoringModel()
    trainer = quiet(limit_train_batches=3, logger=False, enable_checkpointing=False)
    seen = []

    def compare(*_: Any) -> None:
        own = compat.save_loops(trainer.fit_loop)
        assert own == trainer.fit_loop.state_dict()
        seen.append(own)

    module.on_train_batch_end = compare  # type: ignore[method-assign, assignment]
    trainer.fit(module)
    assert len(seen) == 6
    assert seen[0] != seen[1]  # and what is saved does not follow the loops


def test_attributes_of_a_trainer_that_are_not_the_users_are_known(tmp_path: Path) -> None:
    """Any other one goes back after a fault, as the user's."""
    trainer = quiet(
        limit_train_batches=4,
        val_check_interval="00:00:00:01",
        check_val_every_n_epoch=None,
        log_every_n_steps=1,
        default_root_dir=tmp_path,
    )
    trainer.fit(BoringModel())
    trainer.test(BoringModel(), verbose=False)
    assert vars(trainer).keys() <= compat.OF_TRAINER
