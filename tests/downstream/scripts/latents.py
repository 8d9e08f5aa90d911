"""An adaptive VAE of `disent`, as its page trains one: a schedule changes its settings in each step, pairs are drawn.

Its samplers draw from NumPy and Python, in workers.
"""

import os

import lightning as L
import missing_packages  # noqa: F401
import numpy as np
import torch
from disent.dataset import DisentDataset
from disent.dataset.data import XYObjectData
from disent.dataset.sampling import GroundTruthPairOrigSampler
from disent.frameworks.vae import AdaVae
from disent.model import AutoEncoder
from disent.model.ae import DecoderLinear, EncoderLinear
from disent.schedule import CyclicSchedule
from torch.utils.data import DataLoader, Subset

import lightning_replica  # noqa: F401


def to_tensor(image):
    return torch.from_numpy(np.array(image).transpose(2, 0, 1)).float() / 255


def noisy(batch):
    batch["x"] = tuple((x + 0.05 * torch.randn_like(x)).clamp(0, 1) for x in batch["x_targ"])
    return batch


L.seed_everything(1, workers=True)
data = XYObjectData(grid_size=16, grid_spacing=4, min_square_size=3, max_square_size=8, square_size_spacing=4)
dataset = DisentDataset(dataset=data, sampler=GroundTruthPairOrigSampler(), transform=to_tensor)
module = AdaVae(
    model=AutoEncoder(
        encoder=EncoderLinear(x_shape=data.x_shape, z_size=4, z_multiplier=2),
        decoder=DecoderLinear(x_shape=data.x_shape, z_size=4),
    ),
    cfg=AdaVae.cfg(optimizer="adam", optimizer_kwargs={"lr": 1e-3}, loss_reduction="mean_sum", beta=4),
    batch_augment=noisy,
)
module.register_schedule("beta", CyclicSchedule(period=7))
trainer = L.Trainer(
    strategy=os.environ["WILD_STRATEGY"],
    accelerator="cpu",
    devices=2,
    max_epochs=2,
    log_every_n_steps=1,
    enable_progress_bar=False,
)
trainer.fit(
    module,
    DataLoader(dataset, batch_size=24, shuffle=True, num_workers=1),
    DataLoader(Subset(dataset, range(16)), batch_size=8),
)
