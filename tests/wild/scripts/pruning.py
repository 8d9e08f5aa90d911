"""ModelPruning, whose masks live in buffers and hooks."""

import os

import lightning as L
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_replica  # noqa: F401

L.seed_everything(11)
model = BoringModel()
trainer = L.Trainer(
    strategy=os.environ["WILD_STRATEGY"],
    accelerator="cpu",
    devices=2,
    max_epochs=2,
    callbacks=[
        ModelPruning(
            "l1_unstructured",
            parameters_to_prune=[(model.layer, "weight")],
            amount=0.2,
            use_lottery_ticket_hypothesis=False,  # makes the weights and those to go back to share memory, under DDP
        )
    ],
)
trainer.fit(model)
