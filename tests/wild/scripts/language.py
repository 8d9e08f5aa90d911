"""A tiny random GPT-2 of `transformers`: tied weights, dropout, bf16-mixed, accumulation, a warm-up schedule."""

import os
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

import lightning_replica  # noqa: F401


class Language(L.LightningModule):
    hparams: Any

    def __init__(self, lr: float = 1e-3, z_loss: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
        self.model = GPT2LMHeadModel(config)

    def training_step(self, batch, batch_idx):
        output = self.model(input_ids=batch[0], labels=batch[0])
        self.log("train_loss", output.loss, prog_bar=True)
        return output.loss + self.hparams.z_loss * output.logits.logsumexp(-1).square().mean()

    def validation_step(self, batch, batch_idx):
        loss = self.model(input_ids=batch[0], labels=batch[0]).loss
        self.log_dict({"val_loss": loss, "perplexity": loss.exp()}, sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.ndim > 1]
        other = [p for p in self.parameters() if p.ndim == 1]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.lr)
        scheduler = get_linear_schedule_with_warmup(optimizer, 4, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


L.seed_everything(5)
tokens = torch.randint(0, 64, (192, 16))
trainer = L.Trainer(
    strategy=os.environ["WILD_STRATEGY"],
    accelerator="cpu",
    devices=2,
    max_epochs=2,
    precision="bf16-mixed",
    accumulate_grad_batches=3,
    log_every_n_steps=2,
)
train, val = TensorDataset(tokens[:160]), TensorDataset(tokens[160:])
trainer.fit(Language(), DataLoader(train, batch_size=4, shuffle=True), DataLoader(val, batch_size=4))
