"""`pytorch-tabular`: an autoencoder learns to denoise a table, then its encoder is fine-tuned.

Two modules are fitted by two trainers; of each fit, the best checkpoint is loaded.
"""

import os

import numpy as np
import pandas as pd
from pytorch_tabular import TabularModel
from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
from pytorch_tabular.models import CategoryEmbeddingModelConfig
from pytorch_tabular.ssl_models.dae import DenoisingAutoEncoderConfig

import lightning_replica  # noqa: F401

noise = np.random.default_rng(0)
table = pd.DataFrame(
    {
        **{f"x{number}": noise.normal(size=192).astype("float32") for number in range(4)},
        "kind": noise.choice(["a", "b", "c", "d", "e", "f"], size=192),
        "side": noise.choice(["left", "right"], size=192),
    }
)
table["y"] = table["x0"] * 2 + (table["side"] == "left") + noise.normal(0, 0.1, 192).astype("float32")
settings = TrainerConfig(
    batch_size=8,
    max_epochs=2,
    accelerator="cpu",
    devices=2,
    early_stopping_patience=2,
    checkpoints_name="best",  # else the name has a number, and each process that runs the script takes the next one
    progress_bar="none",
    seed=1,
    trainer_kwargs={
        "strategy": "ddp_find_unused_parameters_true" if os.environ["WILD_STRATEGY"] == "ddp" else "replica_zero",
        "enable_model_summary": False,
        "limit_train_batches": 6,
    },
)
encoder = CategoryEmbeddingModelConfig(task="backbone", layers="16-8", dropout=0.1, use_batch_norm=True)
decoder = CategoryEmbeddingModelConfig(task="backbone", layers="8-16", dropout=0.1)
columns = {"continuous_cols": ["x0", "x1", "x2", "x3"], "categorical_cols": ["kind", "side"]}
model = TabularModel(
    data_config=DataConfig(target=None, **columns),
    model_config=DenoisingAutoEncoderConfig(
        encoder_config=encoder, decoder_config=decoder, default_noise_probability=0.5
    ),
    optimizer_config=OptimizerConfig(
        optimizer="AdamW", lr_scheduler="CosineAnnealingWarmRestarts", lr_scheduler_params={"T_0": 4}
    ),
    trainer_config=settings,
    verbose=False,
)
model.pretrain(train=table[:128], validation=table[128:])
tuned = model.create_finetune_model(
    task="regression",
    train=table[:128],
    validation=table[128:],
    head="LinearHead",
    head_config={"layers": "", "dropout": 0.1},
    target=["y"],
)
tuned.finetune()
