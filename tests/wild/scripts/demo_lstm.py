"""Lightning's demo of a recurrent network, which carries its hidden state from batch to batch in an attribute."""

import os

import lightning as L
from lightning.pytorch.demos import WikiText2
from lightning.pytorch.demos.lstm import LightningLSTM

import lightning_replica  # noqa: F401

L.seed_everything(3)
model = LightningLSTM(vocab_size=WikiText2().vocab_size)
trainer = L.Trainer(
    strategy=os.environ["WILD_STRATEGY"],
    accelerator="cpu",
    devices=2,
    max_epochs=2,
    use_distributed_sampler=False,  # its sampler cannot be made again for a part of the data
    log_every_n_steps=5,
)
trainer.fit(model)
