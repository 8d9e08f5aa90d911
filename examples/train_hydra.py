"""The strategy in a Hydra application, laid out like lightning-hydra-template.

python examples/train_hydra.py
python examples/train_hydra.py strategy.replicas=4 trainer.devices=8
python examples/train_hydra.py +experiment=lost_rank       # the same fingerprint, although a rank dies
"""

import hydra
import lightning as L
from gpt import fingerprint
from hydra.utils import instantiate
from omegaconf import DictConfig


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(config: DictConfig) -> None:
    """Train as the configuration specifies."""
    L.seed_everything(config.seed, verbose=False)
    data, model = instantiate(config.data), instantiate(config.model)
    callbacks = [instantiate(callback) for callback in config.callbacks.values()]
    trainer: L.Trainer = instantiate(config.trainer, callbacks=callbacks)
    trainer.fit(model, data)
    if trainer.is_global_zero:
        print(f"fingerprint {fingerprint(model)}")


if __name__ == "__main__":
    main()
