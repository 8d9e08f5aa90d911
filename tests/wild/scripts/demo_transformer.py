"""Lightning's demo of a language model; the text is there, so that nothing is downloaded."""

import os

import lightning as L
from lightning.pytorch.demos import LightningTransformer, WikiText2

import lightning_replica  # noqa: F401

L.seed_everything(2)
model = LightningTransformer(vocab_size=WikiText2().vocab_size)
trainer = L.Trainer(strategy=os.environ["WILD_STRATEGY"], accelerator="cpu", devices=2, max_epochs=2)
trainer.fit(model)
