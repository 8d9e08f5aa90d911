"""N-BEATS of `darts` on synthetic series, with its own checkpoints. It imports `pytorch_lightning`."""

import os

import numpy as np
from darts import TimeSeries
from darts.models import NBEATSModel

import lightning_replica  # noqa: F401

days, noise = np.arange(200), np.random.default_rng(0)
waves = [np.sin(days / (5 + number)) + noise.normal(0, 0.1, len(days)) for number in range(5)]
series = [TimeSeries.from_values(values.astype(np.float32)) for values in waves]
model = NBEATSModel(
    input_chunk_length=24,
    output_chunk_length=6,
    num_stacks=4,
    num_blocks=1,
    layer_widths=16,
    dropout=0.1,
    n_epochs=2,
    batch_size=16,
    random_state=1,
    work_dir="darts",
    model_name="waves",
    save_checkpoints=True,
    force_reset=True,
    pl_trainer_kwargs={
        "strategy": os.environ["WILD_STRATEGY"],
        "accelerator": "cpu",
        "devices": 2,
        "enable_progress_bar": False,
    },
)
model.fit(series[:4], val_series=series[4:])
