"""What a checkpoint that holds only plain data leaves out: of hyperparameters, of states of callbacks and schedulers.

What a script gives to its module, it gives again when it is started again. What states of callbacks and schedulers
refer to, it makes again, and its content goes back with that of all other objects (`state.reachable`). So a value that
cannot be written is left out, and the checkpoint is not lost for it.
"""

import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, Final

from torch import Tensor, nn

from lightning_replica._compat.lightning_names import pl
from lightning_replica.checkpoint.contents import is_plain, unsavable
from lightning_replica.state.atoms import ATOMS

_CLASSES: Final = (pl.LightningModule, pl.LightningDataModule)
_CALLBACKS: Final = "callbacks"  # as Lightning calls them in a checkpoint
_SCHEDULERS: Final = "lr_schedulers"
_LEAVES: Final = (*ATOMS, Tensor, nn.Parameter)


def made_plain(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a checkpoint of which all that this file knows can be written, and what it lacks, in words."""
    made, left = dict(checkpoint), list[str]()
    if _CALLBACKS in checkpoint:
        states = checkpoint[_CALLBACKS]
        made[_CALLBACKS] = {key: state for key, state in states.items() if _can_be_written(state)}
        left += [_why(f"callbacks[{key!r}]", states[key]) for key in states if key not in made[_CALLBACKS]]
    if _SCHEDULERS in checkpoint:
        made[_SCHEDULERS] = [dict(state) for state in checkpoint[_SCHEDULERS]]
        for place, state in enumerate(made[_SCHEDULERS]):
            names = [name for name, value in state.items() if not _can_be_written(value)]
            left += [_why(f"lr_schedulers[{place}][{name!r}]", state.pop(name)) for name in names]
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
    """Return what checkpoints of a trainer will lack as far as it shows by now, in words."""
    owners: Iterable[Any] = (trainer.lightning_module, trainer.datamodule)  # type: ignore[attr-defined]
    callbacks: Iterable[Any] = trainer.callbacks  # type: ignore[attr-defined]
    known = {owner.CHECKPOINT_HYPER_PARAMS_KEY: owner.hparams for owner in owners if owner is not None}
    known[_CALLBACKS] = {each.state_key: _state_of(each) for each in callbacks}
    known[_SCHEDULERS] = [_state_of(config.scheduler) for config in trainer.lr_scheduler_configs]
    return made_plain(known)[1]


def _state_of(owner: Any) -> Any:
    """Return the state of a callback or a scheduler; an empty one if it has none before training begins."""
    try:
        return owner.state_dict()
    except Exception:  # it makes in training what it saves
        return {}


def _can_be_written(value: Any) -> bool:
    """Return whether a state can be written. Those that are plain at first sight are not tried: they may be large."""
    return _is_plain_at_sight(value) or is_plain(value)


def _is_plain_at_sight(value: Any) -> bool:
    if type(value) in (dict, OrderedDict):
        return all(type(key) in ATOMS and _is_plain_at_sight(each) for key, each in value.items())
    if type(value) in (list, tuple):
        return all(map(_is_plain_at_sight, value))
    return type(value) in _LEAVES


def _plain(value: Any) -> Any:
    """Return a value with dicts and lists in place of Lightning's and OmegaConf's."""
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is not None and isinstance(value, omegaconf.Container):
        return omegaconf.OmegaConf.to_container(value)
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if type(value) is list else value
