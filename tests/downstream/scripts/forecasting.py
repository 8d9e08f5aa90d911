"""A network of `pytorch-forecasting` on synthetic series, as its tutorials train it: name, and where to clip."""

import os
import sys

import lightning as L
import numpy as np
import pandas as pd
from pytorch_forecasting import DeepAR, NHiTS, TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.data import GroupNormalizer
from pytorch_forecasting.metrics import QuantileLoss

import lightning_replica  # noqa: F401

L.seed_everything(1, workers=True)
noise, days = np.random.default_rng(0), np.arange(60)
frames = [
    pd.DataFrame(
        {
            "group": str(group),
            "day": days,
            "y": np.sin(days / 5 + group) + noise.normal(0, 0.1, 60),
            "x": noise.normal(size=60),
        }
    )
    for group in range(8)
]
table = pd.concat(frames, ignore_index=True)
kind = {"tft": TemporalFusionTransformer, "deepar": DeepAR, "nhits": NHiTS}[sys.argv[1]]
sizes = {
    "tft": {"hidden_size": 8, "attention_head_size": 2, "hidden_continuous_size": 4, "loss": QuantileLoss()},
    "deepar": {"hidden_size": 8, "rnn_layers": 2},
    "nhits": {"hidden_size": 8},
}[sys.argv[1]]
train = TimeSeriesDataSet(
    table,
    time_idx="day",
    target="y",
    group_ids=["group"],
    max_encoder_length=12,
    max_prediction_length=3,
    static_categoricals=["group"] if kind is not NHiTS else [],
    time_varying_known_reals=["day"] if kind is not NHiTS else [],
    time_varying_unknown_reals=["y", "x"] if kind is TemporalFusionTransformer else ["y"],
    target_normalizer=GroupNormalizer(groups=["group"]),
)
validation = TimeSeriesDataSet.from_dataset(train, table, predict=True, stop_randomization=True)
model = kind.from_dataset(train, dropout=0.1, log_interval=2, reduce_on_plateau_patience=2, **sizes)
trainer = L.Trainer(
    strategy=os.environ["WILD_STRATEGY"],
    accelerator="cpu",
    devices=2,
    max_epochs=2,
    limit_train_batches=8,
    gradient_clip_val=float(sys.argv[2]) if len(sys.argv) > 2 else None,
    enable_progress_bar=False,
    logger=False,
)
trainer.fit(
    model,
    train.to_dataloader(train=True, batch_size=16, num_workers=0),
    validation.to_dataloader(train=False, batch_size=16, num_workers=0),
)
