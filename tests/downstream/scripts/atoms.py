"""SchNet of `schnetpack` with its moving average and its checkpoints, as its tutorials train it; then tested.

Between a validation and the next epoch, the network holds the averaged weights.
"""

import os

import numpy as np
import pytorch_lightning as pl
import torch
import torch.utils.data.dataloader as torch_dataloader
import torchmetrics
from ase import Atoms

vars(torch_dataloader)["T_co"] = torch.utils.data.sampler._T_co  # as it was called until torch 2.6
import schnetpack as spk  # noqa: E402
import schnetpack.transform as trn  # noqa: E402
from schnetpack.data import ASEAtomsData, AtomsDataModule  # noqa: E402

import lightning_replica  # noqa: E402, F401

pl.seed_everything(1, workers=True)
noise = np.random.default_rng(0)
if not os.path.exists("molecules.db"):
    molecules, properties = [], []
    for _ in range(72):
        count = int(noise.integers(3, 6))
        positions = noise.normal(size=(count, 3)) * 1.5
        molecules.append(Atoms(noise.choice([1, 6, 8], size=count), positions))
        properties.append(
            {"energy": np.array([(positions**2).sum()]), "forces": -2 * positions},
        )
    temporary = f"molecules{os.getpid()}.db"
    new = ASEAtomsData.create(temporary, distance_unit="Ang", property_unit_dict={"energy": "eV", "forces": "eV/Ang"})
    new.add_systems(properties, molecules)
    os.replace(temporary, "molecules.db")

cutoff = 3.0
data = AtomsDataModule(
    "molecules.db",
    batch_size=4,
    num_train=48,
    num_val=12,
    num_test=12,
    split_file=None,  # the rank that writes one draws random numbers for it, and which rank does is a matter of luck
    transforms=[trn.ASENeighborList(cutoff), trn.RemoveOffsets("energy", remove_mean=True), trn.CastTo32()],
    num_workers=1,
)
network = spk.model.NeuralNetworkPotential(
    spk.representation.SchNet(
        n_atom_basis=16,
        n_interactions=2,
        radial_basis=spk.nn.GaussianRBF(8, cutoff),
        cutoff_fn=spk.nn.CosineCutoff(cutoff),
    ),
    input_modules=[spk.atomistic.PairwiseDistances()],
    output_modules=[spk.atomistic.Atomwise(16, output_key="energy"), spk.atomistic.Forces()],
    postprocessors=[trn.CastTo64(), trn.AddOffsets("energy", add_mean=True)],
)
outputs = [
    spk.task.ModelOutput(name, torch.nn.MSELoss(), weight, {"mae": torchmetrics.MeanAbsoluteError()})
    for name, weight in (("energy", 0.1), ("forces", 0.9))
]
task = spk.task.AtomisticTask(
    network,
    outputs,
    torch.optim.AdamW,
    {"lr": 5e-3},
    torch.optim.lr_scheduler.ReduceLROnPlateau,
    {"patience": 0, "factor": 0.5, "threshold": 0.5},
    scheduler_monitor="val_loss",
    warmup_steps=6,
)
trainer = pl.Trainer(
    strategy=os.environ["WILD_STRATEGY"],
    accelerator="cpu",
    devices=2,
    max_epochs=3,
    callbacks=[
        spk.train.ModelCheckpoint("best_model", monitor="val_loss", save_top_k=1, save_last=True),
        spk.train.ExponentialMovingAverage(decay=0.9),
    ],
    inference_mode=False,
    enable_progress_bar=False,
)
trainer.fit(task, datamodule=data)
trainer.test(task, datamodule=data)
