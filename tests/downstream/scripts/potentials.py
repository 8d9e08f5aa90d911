"""A potential of `nequip`, trained by its own program from a file of settings: averaged weights and a loss that adapts.

Its losses are metrics that all ranks add up in each step, with gradients. After the fit, the best checkpoint is tested.
"""

import os
import sys

import lightning_replica  # noqa: F401

SETTINGS = """
run: [train, test]
hydra: {run: {dir: output}, job: {chdir: false}}
data:
  _target_: nequip.data.datamodule.NequIPDataModule
  seed: 1
  split_dataset:
    dataset:
      _target_: nequip.data.dataset.EMTTestDataset
      transforms:
        - {_target_: nequip.data.transforms.ChemicalSpeciesToAtomTypeMapper, model_type_names: [Cu]}
        - {_target_: nequip.data.transforms.NeighborListTransform, r_max: 3.5}
      supercell: [2, 2, 2]
      seed: 1
      num_frames: 40
      element: Cu
    train: 24
    val: 8
    test: 8
  train_dataloader: {_target_: torch.utils.data.DataLoader, batch_size: 2, shuffle: true}
  val_dataloader: {_target_: torch.utils.data.DataLoader, batch_size: 2}
  test_dataloader: ${data.val_dataloader}
  stats_manager: {_target_: nequip.data.CommonDataStatisticsManager, type_names: [Cu]}
trainer:
  _target_: lightning.Trainer
  strategy: ${oc.env:WILD_STRATEGY}
  accelerator: cpu
  devices: 2
  max_epochs: 3
  enable_progress_bar: false
  log_every_n_steps: 1
  logger: {_target_: lightning.pytorch.loggers.CSVLogger, save_dir: .}
  callbacks:
    - _target_: lightning.pytorch.callbacks.ModelCheckpoint
      monitor: val0_epoch/weighted_sum
      dirpath: output
      filename: best
      save_last: true
    - {_target_: nequip.train.callbacks.SoftAdapt, beta: 1.1, interval: batch, frequency: 3}
    - {_target_: nequip.train.callbacks.LossCoefficientMonitor, interval: batch, frequency: 1}
training_module:
  _target_: nequip.train.EMALightningModule
  ema_decay: 0.9
  loss:
    _target_: nequip.train.EnergyForceLoss
    coeffs: {total_energy: 1.0, forces: 1.0}
  val_metrics:
    _target_: nequip.train.EnergyForceMetrics
    coeffs: {total_energy_mae: 1.0, forces_mae: 1.0}
  train_metrics: ${training_module.val_metrics}
  test_metrics: ${training_module.val_metrics}
  optimizer: {_target_: torch.optim.Adam, lr: 0.01}
  lr_scheduler:
    scheduler: {_target_: torch.optim.lr_scheduler.ReduceLROnPlateau, patience: 0, factor: 0.5, threshold: 0.5}
    monitor: val0_epoch/weighted_sum
    interval: epoch
    frequency: 1
  model:
    _target_: nequip.model.NequIPGNNModel
    seed: 1
    model_dtype: float32
    type_names: [Cu]
    r_max: 3.5
    l_max: 1
    num_layers: 2
    num_features: 4
    radial_mlp_depth: 1
    radial_mlp_width: 8
    avg_num_neighbors: ${training_data_stats:num_neighbors_mean}
    per_type_energy_shifts: ${training_data_stats:per_atom_energy_mean}
    per_type_energy_scales: ${training_data_stats:forces_rms}
"""
if not os.path.exists("config.yaml"):
    with open(f"{os.getpid()}.yaml", "w") as file:
        file.write(SETTINGS)
    os.replace(f"{os.getpid()}.yaml", "config.yaml")

from nequip.scripts.train import main  # noqa: E402  # looks for the file when it is imported

if __name__ == "__main__":
    sys.exit(main())
