"""Points around the corners of a cube, written to disk once and read by every rank."""

from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset, random_split


class Blobs(L.LightningDataModule):
    hparams: Any

    def __init__(self, data_dir, split=(240, 80, 80), batch_size=16, num_workers=0, pin_memory=False):
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.train_part = self.val_part = self.test_part = None
        self.batch_size_per_device = batch_size

    @property
    def file(self):
        return Path(self.hparams.data_dir) / "blobs.pt"

    def prepare_data(self):
        if self.file.exists():
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        generator = torch.Generator().manual_seed(0)
        corners = torch.randint(0, 8, (sum(self.hparams.split),), generator=generator)
        bits = (corners[:, None] >> torch.arange(3)) & 1
        points = bits.float() + torch.randn(len(corners), 3, generator=generator) * 0.3
        torch.save([points, corners], self.file)

    def setup(self, stage=None):
        if self.trainer is not None:
            if self.hparams.batch_size % self.trainer.world_size:
                raise RuntimeError("the batch does not divide by the number of devices")
            self.batch_size_per_device = self.hparams.batch_size // self.trainer.world_size
        if self.train_part is None:
            dataset = TensorDataset(*torch.load(self.file))
            generator = torch.Generator().manual_seed(42)
            self.train_part, self.val_part, self.test_part = random_split(dataset, self.hparams.split, generator)

    def _loader(self, part, shuffle=False):
        return DataLoader(
            part,
            batch_size=self.batch_size_per_device,
            num_workers=self.hparams.num_workers,
            pin_memory=self.hparams.pin_memory,
            shuffle=shuffle,
        )

    def train_dataloader(self):
        return self._loader(self.train_part, shuffle=True)

    def val_dataloader(self):
        return self._loader(self.val_part)

    def test_dataloader(self):
        return self._loader(self.test_part)

    def state_dict(self):
        return {"split": list(self.hparams.split)}

    def load_state_dict(self, state_dict):
        assert state_dict["split"] == list(self.hparams.split)
