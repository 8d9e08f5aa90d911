"""NHITS of `neuralforecast` on synthetic series, as its README trains it. It imports `pytorch_lightning`."""

import os

import numpy as np
import pandas as pd
from neuralforecast import NeuralForecast
from neuralforecast.models import NHITS

import lightning_replica  # noqa: F401

days, noise = np.arange(200), np.random.default_rng(0)
series = [np.sin(days / (5 + number)) + noise.normal(0, 0.1, len(days)) for number in range(8)]
dates = pd.date_range("2020-01-01", periods=len(days), freq="D")
table = pd.concat(
    pd.DataFrame({"unique_id": f"series {number}", "ds": dates, "y": values}) for number, values in enumerate(series)
)
model = NHITS(
    h=12,
    input_size=24,
    max_steps=40,
    val_check_steps=10,
    batch_size=4,
    dropout_prob_theta=0.1,
    strategy=os.environ["WILD_STRATEGY"],
    accelerator="cpu",
    devices=2,
    enable_progress_bar=False,
)
NeuralForecast(models=[model], freq="D").fit(table, val_size=24)
