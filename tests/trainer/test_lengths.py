"""Ranks with different numbers of batches are told before they train."""

import json
import os
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

from lightning_replica import ReplicaZeroStrategy
from lightning_replica.errors import ConfigurationError
from lightning_replica.trainer import lengths
from tests.support import world
from tests.support.job import Case


def test_the_same_number() -> None:
    for batches in ([3], [3, 3], [lengths.UNSIZED] * 2, []):
        lengths.check(batches)


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        ([4, 6, 4], r"\(ranks 0, 2: 4; rank 1: 6\), but every step needs all ranks. .* or use `limit_train_batches=4`"),
        ([lengths.UNSIZED, 6], r"\(rank 0: no length; rank 1: 6\).*limit_train_batches=6"),
    ],
)
def test_other_numbers(batches: list[int], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        lengths.check(batches)


def uneven(case: Case, out: Path) -> None:
    """Four batches on rank 0 and six on rank 1; with ``case.accumulate``, no more than so many."""
    torch.set_num_threads(1)
    data = DataLoader(RandomDataset(32, 4 + 2 * int(os.environ["LOCAL_RANK"])))
    trainer = L.Trainer(
        strategy=ReplicaZeroStrategy(),
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        limit_train_batches=case.accumulate,
        limit_val_batches=0,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BoringModel(), data)
    (out / f"rank{trainer.global_rank}.json").write_text(json.dumps({"steps": trainer.global_step}))


def test_all_ranks_end_before_the_first_step(tmp_path: Path) -> None:
    outcome = world.run(Case(devices=2, accumulate=5), tmp_path, target=uneven)
    assert outcome.code == 1
    assert "(rank 0: 4; rank 1: 5)" in outcome.logs
    assert "limit_train_batches=4" in outcome.logs


def test_the_limit_that_is_advised(tmp_path: Path) -> None:
    outcome = world.run(Case(devices=2, accumulate=4), tmp_path, target=uneven)
    assert outcome.code == 0, outcome.logs
    assert outcome.ranks == [{"steps": 4}] * 2
