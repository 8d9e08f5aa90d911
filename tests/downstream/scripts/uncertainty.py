"""A classifier of `torch-uncertainty`: fitted twice by two trainers, then tested."""

import os

import lightning as L
import missing_packages  # noqa: F401
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch_uncertainty.routines import ClassificationRoutine

import lightning_replica  # noqa: F401

L.seed_everything(1, workers=True)
network = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
routine = ClassificationRoutine(
    model=network,
    num_classes=4,
    loss=nn.CrossEntropyLoss(),
    optim_recipe=torch.optim.Adam(network.parameters(), lr=0.01),
)


def loader(count):
    inputs = torch.randn(count, 6)
    return DataLoader(TensorDataset(inputs, inputs.argmax(1) % 4), batch_size=8, shuffle=count > 40, num_workers=0)


train, validation, test = loader(96), loader(32), loader(32)
for epochs in (2, 1):
    trainer = L.Trainer(
        strategy=os.environ["WILD_STRATEGY"],
        accelerator="cpu",
        devices=2,
        max_epochs=epochs,
        enable_progress_bar=False,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(routine, train, validation)
trainer.test(routine, test)
