"""TOTALVI of `scvi-tools` on synthetic cells: an adversary optimized by hand, its own trainer, logger and stops."""

import os

import scvi
from scvi.model import TOTALVI

import lightning_replica

scvi.settings.seed = 1
cells = scvi.data.synthetic_iid(batch_size=60, n_genes=20, n_proteins=6, n_regions=4)
TOTALVI.setup_anndata(
    cells, batch_key="batch", protein_expression_obsm_key="protein_expression", protein_names_uns_key="protein_names"
)
model = TOTALVI(cells, n_latent=4, n_hidden=16)
ours = os.environ["WILD_STRATEGY"] == "replica_zero"
model.train(
    max_epochs=3,
    train_size=0.7,
    validation_size=0.2,
    batch_size=8,
    accelerator="cpu",
    devices=2,
    strategy=lightning_replica.ReplicaZeroStrategy() if ours else "ddp_find_unused_parameters_true",
    enable_progress_bar=False,
    early_stopping_patience=2,
    n_epochs_kl_warmup=None,
    n_steps_kl_warmup=20,
    plan_kwargs={"lr_patience": 1, "lr_threshold": 1e3},
    datasplitter_kwargs={"drop_dataset_tail": True, "drop_last": False},
)
rank = model.trainer.global_rank
if rank == 0:  # what its users look at
    with open("metrics.csv", "w") as file:
        print("metric,step,value", file=file)
        for name, table in sorted(model.history.items()):
            for step, value in table[name].items():
                print(f"{name},{step},{value!r}", file=file)
