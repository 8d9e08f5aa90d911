"""Private names still exist, and the places of Lightning that are followed line by line still read the same."""

import ast
import hashlib
import importlib
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_replica._compat import lightning as compat
from lightning_replica._compat import torch as torch_compat

# What was followed, and how it read in lightning 2.6.6. If one changes: read what changed, follow it in
# lightning_replica/trainer/fit_loop.py or state/host_state.py, then put the new digest here.
FOLLOWED: dict[str, tuple[Callable[..., Any], str]] = {
    "the loop of _FitLoop.run (ReplicaFitLoop._epochs)": (compat._FitLoop.run, "93956bf26623"),
    "the loop of _TrainingEpochLoop.run (ReplicaEpochLoop.run)": (compat._TrainingEpochLoop.run, "f225cc90deca"),
    "a batch and its tail (ReplicaEpochLoop._tail, LightningHostState._transfer)": (
        compat._TrainingEpochLoop.advance,
        "dd4eb4d2b65d",
    ),
    "the end of an epoch (ReplicaFitLoop._end_epoch)": (compat._FitLoop.on_advance_end, "a22019836c01"),
    "loaders of training (ReplicaFitLoop._load_combined_loader_states)": (compat._FitLoop.setup_data, "0d8e96a3dc11"),
    "loaders in validations (ReplicaValidationLoop.setup_data)": (compat._EvaluationLoop.setup_data, "81d3c1203e8d"),
    "the step of automatic optimization (ReplicaEpochLoop._tail)": (
        compat._AutomaticOptimization._optimizer_step,
        "e5bda9f172f2",
    ),
}


def digest(function: Callable[..., Any]) -> str:
    """Of the code, not of comments and docstrings."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:12]


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_is_followed_reads_the_same(name: str) -> None:
    function, expected = FOLLOWED[name]
    assert digest(function) == expected


def test_private_names_exist() -> None:
    assert all(hasattr(compat, name) for name in compat.__all__)


def test_the_names_in_the_metadata_of_a_checkpoint_exist() -> None:
    for module, names in torch_compat._DCP_METADATA.items():
        assert all(hasattr(importlib.import_module(module), name) for name in names), module


def test_loops_are_saved_as_they_save_themselves() -> None:
    module = BoringModel()
    trainer = L.Trainer(
        max_epochs=2,
        limit_train_batches=3,
        limit_val_batches=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    seen = []

    def compare(*_: Any) -> None:
        own = compat.save_loops(trainer.fit_loop)
        assert own == trainer.fit_loop.state_dict()
        seen.append(own)

    module.on_train_batch_end = compare  # type: ignore[method-assign]
    trainer.fit(module)
    assert len(seen) == 6
    assert seen[0] != seen[1]  # and what is saved does not follow the loops
