"""Hyperparameters in checkpoints that hold only plain data: what is plain, what can be made plain, what is left out."""

import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final

from lightning_replica._compat.lightning_names import pl
from lightning_replica.checkpoint.contents import is_plain, unsavable

_CLASSES: Final = (pl.LightningModule, pl.LightningDataModule)


def made_plain(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a checkpoint whose hyperparameters can be written, and what it lacks, in words.

    What a script gives to its module, it gives again when it is started again. So a value that cannot be written is
    left out, and the checkpoint is not lost for it.
    """
    made, left = dict(checkpoint), list[str]()
    for owner in _CLASSES:
        key = owner.CHECKPOINT_HYPER_PARAMS_KEY
        if key in checkpoint:
            made[key] = _plain(checkpoint[key])
            names = [name for name, value in made[key].items() if not is_plain(value)]
            left += [_why(f"{key}[{name!r}]", made[key].pop(name)) for name in names]
            made.pop(owner.CHECKPOINT_HYPER_PARAMS_TYPE, None)  # a class
    return made, left


def _why(name: str, value: Any) -> str:
    """Return which value is left out and why: it may be something in it that cannot be written."""
    said = unsavable(value, name)
    return said if said.startswith(f"{name} is ") else f"{name}, as {said}"


def left_out(trainer: pl.Trainer) -> list[str]:
    """Return which hyperparameters of a trainer's module and data module checkpoints will lack, in words."""
    owners: Iterable[Any] = (trainer.lightning_module, trainer.datamodule)  # type: ignore[attr-defined]
    given = {owner.CHECKPOINT_HYPER_PARAMS_KEY: owner.hparams for owner in owners if owner is not None}
    return made_plain(given)[1]


def _plain(value: Any) -> Any:
    """Return a value with dicts and lists in place of Lightning's and OmegaConf's."""
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is not None and isinstance(value, omegaconf.Container):
        return omegaconf.OmegaConf.to_container(value)
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if type(value) is list else value
