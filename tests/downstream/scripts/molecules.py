"""A message passing network of `chemprop`, as its notebooks train it; then it is tested on one process."""

import os

import lightning as L
import missing_packages  # noqa: F401
import numpy as np
from chemprop import data, models, nn

import lightning_replica  # noqa: F401

L.seed_everything(1, workers=True)
atoms, noise = ["C", "N", "O", "CC", "CCO", "c1ccccc1", "C(=O)", "CN"], np.random.default_rng(0)
texts = ["C" + "".join(noise.choice(atoms, size=4)) + "C" for _ in range(72)]
points = [data.MoleculeDatapoint.from_smi(text, [float(len(text)) + float(noise.normal())]) for text in texts]
train, validation, test = (data.MoleculeDataset(points[start:end]) for start, end in ((0, 48), (48, 60), (60, 72)))
scaler = train.normalize_targets()
validation.normalize_targets(scaler)
model = models.MPNN(
    nn.BondMessagePassing(d_h=16, depth=2, dropout=0.1),
    nn.MeanAggregation(),
    nn.RegressionFFN(input_dim=16, hidden_dim=8, output_transform=nn.UnscaleTransform.from_standard_scaler(scaler)),
    batch_norm=True,
    warmup_epochs=1,
)
trainer = L.Trainer(
    strategy=os.environ["WILD_STRATEGY"],
    accelerator="cpu",
    devices=2,
    max_epochs=3,
    enable_progress_bar=False,
    logger=False,
)
trainer.fit(
    model,
    data.build_dataloader(train, batch_size=4, seed=1),
    data.build_dataloader(validation, batch_size=4, shuffle=False),
)
trainer.test(model, data.build_dataloader(test, batch_size=4, shuffle=False))
