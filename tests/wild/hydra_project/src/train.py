"""Builds everything from the configuration, trains, and tests the best weights."""

import functools
import logging
import sys
from pathlib import Path

import hydra
import lightning as L
from hydra.utils import instantiate

sys.path.insert(0, str(Path(__file__).parents[1]))
import lightning_replica  # noqa: F401

log = logging.getLogger(__name__)


def reported(task):
    """Says where the output is, however the task has ended."""

    @functools.wraps(task)
    def run(cfg):
        try:
            return task(cfg)
        except Exception:
            log.exception("the task failed")
            raise
        finally:
            log.info("Output: %s", cfg.paths.output_dir)

    return run


@reported
def train(cfg):
    L.seed_everything(cfg.seed, workers=True)
    datamodule = instantiate(cfg.data)
    model = instantiate(cfg.model)
    callbacks = [instantiate(callback) for callback in cfg.callbacks.values()]
    loggers = [instantiate(logger) for logger in cfg.logger.values()]
    trainer = instantiate(cfg.trainer, callbacks=callbacks, logger=loggers)
    for logger in trainer.loggers:
        logger.log_hyperparams({"seed": cfg.seed, "parameters": sum(p.numel() for p in model.parameters())})
    if cfg.train:
        trainer.fit(model=model, datamodule=datamodule, ckpt_path=cfg.ckpt_path)
    found = dict(trainer.callback_metrics)
    if cfg.test:
        best = trainer.checkpoint_callback.best_model_path
        trainer.test(model=model, datamodule=datamodule, ckpt_path=best or None, weights_only=False)
        log.info("Best: %s", best)
    return {**found, **trainer.callback_metrics}


@hydra.main(version_base="1.3", config_path="../configs", config_name="train")
def main(cfg):
    return train(cfg)[cfg.optimized_metric].item()


if __name__ == "__main__":
    main()
