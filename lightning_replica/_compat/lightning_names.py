"""Lightning's names, public and private, from the package that this process uses (`packages`).

This is the only module that imports Lightning. An import elsewhere could bring in the package that the script does not
use. Both halves import the same names (tests/compat/test_packages.py).
"""

from typing import TYPE_CHECKING

from lightning_replica._compat.packages import LIGHTNING, chosen
from lightning_replica._compat.versions import (
    LIGHTNING_VERSIONS,
    check_version,
    need,
    need_in_instances,
    need_parameters,
    private_names_of,
)

check_version(chosen().distribution, LIGHTNING_VERSIONS)
with private_names_of(chosen().distribution):
    if TYPE_CHECKING or chosen() is LIGHTNING:
        import lightning.pytorch as pl
        from lightning.fabric import accelerators as fabric_accelerators
        from lightning.fabric import plugins as fabric_plugins
        from lightning.fabric import strategies as fabric_strategies
        from lightning.fabric.accelerators.registry import _AcceleratorRegistry
        from lightning.fabric.loggers import Logger as FabricLogger
        from lightning.fabric.plugins.environments import LightningEnvironment
        from lightning.fabric.strategies import STRATEGY_REGISTRY
        from lightning.fabric.strategies.registry import _StrategyRegistry
        from lightning.fabric.utilities.data import _set_sampler_epoch, sized_len
        from lightning.fabric.utilities.distributed import _all_gather_ddp_if_available, _set_num_threads_if_needed
        from lightning.fabric.utilities.seed import reset_seed
        from lightning.pytorch.accelerators import (
            Accelerator,
            AcceleratorRegistry,
            CPUAccelerator,
            CUDAAccelerator,
            MPSAccelerator,
        )
        from lightning.pytorch.callbacks import (
            BackboneFinetuning,
            Callback,
            Checkpoint,
            LearningRateMonitor,
            ModelCheckpoint,
            ProgressBar,
            RichProgressBar,
            StochasticWeightAveraging,
            Timer,
            WeightAveraging,
        )
        from lightning.pytorch.core.saving import load_hparams_from_yaml
        from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
        from lightning.pytorch.loggers.csv_logs import ExperimentWriter
        from lightning.pytorch.loops import _EvaluationLoop, _FitLoop, _TrainingEpochLoop
        from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
        from lightning.pytorch.loops.loop import _Loop
        from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization
        from lightning.pytorch.loops.optimization.manual import _ManualOptimization
        from lightning.pytorch.loops.progress import _BaseProgress
        from lightning.pytorch.plugins import (
            AsyncCheckpointIO,
            CheckpointIO,
            ClusterEnvironment,
            MixedPrecision,
            Precision,
            TorchCheckpointIO,
        )
        from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
        from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, Strategy, StrategyRegistry
        from lightning.pytorch.strategies.launchers.launcher import _Launcher
        from lightning.pytorch.strategies.launchers.subprocess_script import (
            _HYDRA_AVAILABLE,
            _basic_subprocess_cmd,
            _hydra_subprocess_cmd,
        )
        from lightning.pytorch.trainer.call import (
            _call_callback_hooks,
            _call_lightning_module_hook,
            _call_strategy_hook,
        )
        from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
        from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector
        from lightning.pytorch.trainer.connectors.logger_connector.result import (
            _Metadata,
            _ResultCollection,
            _ResultMetric,
            _Sync,
        )
        from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
        from lightning.pytorch.trainer.states import TrainerFn
        from lightning.pytorch.tuner.lr_finder import _LRCallback
        from lightning.pytorch.utilities.combined_loader import _SUPPORTED_MODES, CombinedLoader
        from lightning.pytorch.utilities.exceptions import _TunerExitException
        from lightning.pytorch.utilities.rank_zero import rank_zero_only
        from lightning.pytorch.utilities.seed import isolate_rng
    else:
        import pytorch_lightning as pl
        from lightning_fabric import accelerators as fabric_accelerators
        from lightning_fabric import plugins as fabric_plugins
        from lightning_fabric import strategies as fabric_strategies
        from lightning_fabric.accelerators.registry import _AcceleratorRegistry
        from lightning_fabric.loggers import Logger as FabricLogger
        from lightning_fabric.plugins.environments import LightningEnvironment
        from lightning_fabric.strategies import STRATEGY_REGISTRY
        from lightning_fabric.strategies.registry import _StrategyRegistry
        from lightning_fabric.utilities.data import _set_sampler_epoch, sized_len
        from lightning_fabric.utilities.distributed import _all_gather_ddp_if_available, _set_num_threads_if_needed
        from lightning_fabric.utilities.seed import reset_seed
        from pytorch_lightning.accelerators import (
            Accelerator,
            AcceleratorRegistry,
            CPUAccelerator,
            CUDAAccelerator,
            MPSAccelerator,
        )
        from pytorch_lightning.callbacks import (
            BackboneFinetuning,
            Callback,
            Checkpoint,
            LearningRateMonitor,
            ModelCheckpoint,
            ProgressBar,
            RichProgressBar,
            StochasticWeightAveraging,
            Timer,
            WeightAveraging,
        )
        from pytorch_lightning.core.saving import load_hparams_from_yaml
        from pytorch_lightning.loggers import CSVLogger, Logger, TensorBoardLogger
        from pytorch_lightning.loggers.csv_logs import ExperimentWriter
        from pytorch_lightning.loops import _EvaluationLoop, _FitLoop, _TrainingEpochLoop
        from pytorch_lightning.loops.fetchers import _DataLoaderIterDataFetcher
        from pytorch_lightning.loops.loop import _Loop
        from pytorch_lightning.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization
        from pytorch_lightning.loops.optimization.manual import _ManualOptimization
        from pytorch_lightning.loops.progress import _BaseProgress
        from pytorch_lightning.plugins import (
            AsyncCheckpointIO,
            CheckpointIO,
            ClusterEnvironment,
            MixedPrecision,
            Precision,
            TorchCheckpointIO,
        )
        from pytorch_lightning.plugins.io.wrapper import _WrappingCheckpointIO
        from pytorch_lightning.strategies import DDPStrategy, ParallelStrategy, Strategy, StrategyRegistry
        from pytorch_lightning.strategies.launchers.launcher import _Launcher
        from pytorch_lightning.strategies.launchers.subprocess_script import (
            _HYDRA_AVAILABLE,
            _basic_subprocess_cmd,
            _hydra_subprocess_cmd,
        )
        from pytorch_lightning.trainer.call import (
            _call_callback_hooks,
            _call_lightning_module_hook,
            _call_strategy_hook,
        )
        from pytorch_lightning.trainer.connectors.checkpoint_connector import _CheckpointConnector
        from pytorch_lightning.trainer.connectors.logger_connector import _LoggerConnector
        from pytorch_lightning.trainer.connectors.logger_connector.result import (
            _Metadata,
            _ResultCollection,
            _ResultMetric,
            _Sync,
        )
        from pytorch_lightning.trainer.connectors.signal_connector import _SignalConnector
        from pytorch_lightning.trainer.states import TrainerFn
        from pytorch_lightning.tuner.lr_finder import _LRCallback
        from pytorch_lightning.utilities.combined_loader import _SUPPORTED_MODES, CombinedLoader
        from pytorch_lightning.utilities.exceptions import _TunerExitException
        from pytorch_lightning.utilities.rank_zero import rank_zero_only
        from pytorch_lightning.utilities.seed import isolate_rng

    # What the package reads, writes or calls in Lightning's objects. A name that is only written would do so silently.
    need(pl.Trainer, "_results")
    need_in_instances(pl.Trainer, "_checkpoint_connector", "_logger_connector", "_signal_connector", "fit_loop")
    need_in_instances(pl.LightningModule, "_current_fx_name", "_device_mesh", "_on_before_batch_transfer")
    need(_CheckpointConnector, "dump_checkpoint", "_select_ckpt_path")
    need_parameters(_CheckpointConnector.dump_checkpoint, "weights_only")
    need(_SignalConnector, "_sigterm_notifier_fn", "_slurm_sigusr_handler_fn")
    need_in_instances(_SignalConnector, "_original_handlers", "received_sigterm")
    need(_LoggerConnector, "on_batch_end", "update_train_step_metrics")
    need_in_instances(_LoggerConnector, "_callback_metrics", "_current_fx", "_first_loop_iter", "_logged_metrics")
    need_in_instances(_LoggerConnector, "_progress_bar_metrics")
    need(_Loop, "_load_from_state_dict", "on_save_checkpoint", "on_iteration_done")
    need_in_instances(_Loop, "_restarting")
    need_in_instances(_FitLoop, "_combined_loader", "_data_fetcher", "epoch_loop", "epoch_progress")
    need(_TrainingEpochLoop, "_num_ready_batches_reached", "_should_accumulate", "_should_check_val_fx")
    need(_TrainingEpochLoop, "_on_after_fetch", "_on_before_fetch")
    need_in_instances(_TrainingEpochLoop, "_batches_that_stepped", "_results", "batch_progress", "val_loop")
    need_in_instances(_EvaluationLoop, "_combined_loader", "_data_fetcher", "_has_run", "_module_mode", "_results")
    need_in_instances(_EvaluationLoop, "_seen_batches_per_dataloader")
    need(_AutomaticOptimization, "_make_closure")
    need_in_instances(Closure, "_result")
    need_in_instances(CombinedLoader, "_flattened", "_iterator", "_mode")
    need_in_instances(CSVLogger, "_experiment", "_fs", "_prefix")
    need_in_instances(ExperimentWriter, "metrics", "metrics_file_path", "metrics_keys")
    need_in_instances(ModelCheckpoint, "_fs")
    need_in_instances(StochasticWeightAveraging, "_average_model", "_initialized")
    need_in_instances(WeightAveraging, "_average_model")
    need(MixedPrecision, "_after_closure")
    need(fabric_strategies.DDPStrategy, "_configure_launcher", "_set_world_ranks", "_setup_distributed")

__all__ = [
    "AsyncCheckpointIO",
    "Accelerator",
    "AcceleratorRegistry",
    "BackboneFinetuning",
    "CPUAccelerator",
    "CSVLogger",
    "CUDAAccelerator",
    "Callback",
    "Checkpoint",
    "CheckpointIO",
    "Closure",
    "ClosureResult",
    "ClusterEnvironment",
    "CombinedLoader",
    "DDPStrategy",
    "ExperimentWriter",
    "LearningRateMonitor",
    "LightningEnvironment",
    "FabricLogger",
    "Logger",
    "MPSAccelerator",
    "MixedPrecision",
    "ModelCheckpoint",
    "ParallelStrategy",
    "Precision",
    "ProgressBar",
    "RichProgressBar",
    "STRATEGY_REGISTRY",
    "StochasticWeightAveraging",
    "Strategy",
    "StrategyRegistry",
    "TensorBoardLogger",
    "Timer",
    "TorchCheckpointIO",
    "TrainerFn",
    "WeightAveraging",
    "_AcceleratorRegistry",
    "_AutomaticOptimization",
    "_CheckpointConnector",
    "_LoggerConnector",
    "_SignalConnector",
    "_BaseProgress",
    "_DataLoaderIterDataFetcher",
    "_EvaluationLoop",
    "_FitLoop",
    "_HYDRA_AVAILABLE",
    "_LRCallback",
    "_Launcher",
    "_Loop",
    "_ManualOptimization",
    "_Metadata",
    "_ResultCollection",
    "_ResultMetric",
    "_SUPPORTED_MODES",
    "_StrategyRegistry",
    "_Sync",
    "_TrainingEpochLoop",
    "_TunerExitException",
    "_WrappingCheckpointIO",
    "_all_gather_ddp_if_available",
    "_basic_subprocess_cmd",
    "_call_callback_hooks",
    "_call_lightning_module_hook",
    "_call_strategy_hook",
    "_hydra_subprocess_cmd",
    "_set_num_threads_if_needed",
    "_set_sampler_epoch",
    "fabric_accelerators",
    "fabric_plugins",
    "fabric_strategies",
    "isolate_rng",
    "load_hparams_from_yaml",
    "pl",
    "rank_zero_only",
    "reset_seed",
    "sized_len",
]
