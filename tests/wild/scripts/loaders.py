"""Loaders of every kind, combined: map, iterable, workers that stay, own samplers, own collate functions."""

import os

import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset, RandomDictDataset
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Subset,
    get_worker_info,
)

import lightning_replica  # noqa: F401


class Numbers(IterableDataset[torch.Tensor]):
    """Each rank and each worker reads its part, as torch's documentation has it."""

    def __iter__(self):
        info = get_worker_info()
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        for number in range(rank * workers + worker, 60, 2 * workers):
            yield torch.full((32,), number / 60) + torch.randn(32) * 0.01


class Noisy(RandomDataset):
    """Augments in the worker."""

    def __getitem__(self, index):
        return super().__getitem__(index) + torch.randn(self.data.shape[1]) * 0.1


def stack_twice(samples):
    return torch.cat([torch.stack(samples), -torch.stack(samples)])


def leaves(batch):
    return [batch] if isinstance(batch, torch.Tensor) else [t for part in batch.values() for t in leaves(part)]


class Model(BoringModel):
    def training_step(self, batch, batch_idx):
        loss = sum(self.step(t) for t in leaves(batch)) / 20
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val_loss", self.step(batch), sync_dist=True)

    def train_dataloader(self):
        noisy = Noisy(32, 90)
        return CombinedLoader(
            {
                "workers": DataLoader(noisy, batch_size=3, shuffle=True, num_workers=2, persistent_workers=True),
                "iterable": DataLoader(Numbers(), batch_size=2, num_workers=1),
                "dict": DataLoader(RandomDictDataset(32, 50), batch_size=4, shuffle=True, drop_last=True),
                "batches": DataLoader(
                    ConcatDataset([RandomDataset(32, 30), Subset(noisy, range(20))]),
                    batch_sampler=BatchSampler(RandomSampler(range(50)), 2, False),
                ),
                "collated": DataLoader(RandomDataset(32, 40), batch_size=4, collate_fn=stack_twice),
            },
            "max_size_cycle",
        )

    def val_dataloader(self):
        return [DataLoader(RandomDataset(32, 24), batch_size=3), DataLoader(Numbers(), batch_size=4, num_workers=1)]


L.seed_everything(14, workers=True)
trainer = L.Trainer(
    strategy=os.environ["WILD_STRATEGY"],
    accelerator="cpu",
    devices=2,
    max_epochs=3,
    log_every_n_steps=4,
    val_check_interval=8,
)
trainer.fit(Model())
