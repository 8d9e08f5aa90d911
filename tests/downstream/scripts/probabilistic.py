"""DeepAR of `gluonts` on synthetic series. Its loader goes on from epoch to epoch."""

import os

import numpy as np
from gluonts.dataset.common import ListDataset
from gluonts.torch.model.deepar import DeepAREstimator
from lightning import seed_everything

import lightning_replica  # noqa: F401

seed_everything(1)
noise = np.random.default_rng(0)
series = [np.sin(np.arange(200) / (5 + number)) + noise.normal(0, 0.1, 200) for number in range(8)]
train = ListDataset([{"start": "2020-01-01", "target": values} for values in series], freq="D")
estimator = DeepAREstimator(
    freq="D",
    prediction_length=6,
    context_length=12,
    hidden_size=8,
    batch_size=8,
    num_batches_per_epoch=6,
    trainer_kwargs={
        "max_epochs": 3,
        "strategy": os.environ["WILD_STRATEGY"],
        "accelerator": "cpu",
        "devices": 2,
        "enable_progress_bar": False,
    },
)
estimator.train(train)
