"""MoCo of `lightly` with its memory bank and its momentum encoder, as its examples train it."""

import copy
import os

import lightning as L
import missing_packages  # noqa: F401
import torch
from lightly.loss.ntx_ent_loss import NTXentLoss
from lightly.models.modules.heads import MoCoProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.utils.scheduler import CosineWarmupScheduler, cosine_schedule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_replica  # noqa: F401


class MoCo(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(1)
        )
        self.projection_head = MoCoProjectionHead(8, 16, 8)
        self.backbone_momentum = copy.deepcopy(self.backbone)
        self.projection_head_momentum = copy.deepcopy(self.projection_head)
        deactivate_requires_grad(self.backbone_momentum)
        deactivate_requires_grad(self.projection_head_momentum)
        self.criterion = NTXentLoss(memory_bank_size=(64, 8))

    def training_step(self, batch, batch_idx):
        momentum = cosine_schedule(self.current_epoch, 10, 0.996, 1)
        update_momentum(self.backbone, self.backbone_momentum, m=momentum)
        update_momentum(self.projection_head, self.projection_head_momentum, m=momentum)
        (images,) = batch
        query = self.projection_head(self.backbone(images + 0.1 * torch.randn_like(images)))
        with torch.no_grad():
            key = self.projection_head_momentum(self.backbone_momentum(images))
        loss = self.criterion(query, key)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.06, momentum=0.9)
        return [optimizer], [{"scheduler": CosineWarmupScheduler(optimizer, 3, 20), "interval": "step"}]


L.seed_everything(1, workers=True)
data = TensorDataset(torch.randn(96, 3, 16, 16))
trainer = L.Trainer(
    strategy=os.environ["WILD_STRATEGY"], accelerator="cpu", devices=2, max_epochs=2, enable_progress_bar=False
)
trainer.fit(MoCo(), DataLoader(data, batch_size=8, shuffle=True, num_workers=1, persistent_workers=True))
