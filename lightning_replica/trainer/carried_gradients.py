"""Gradients in checkpoints: those that lie between two steps, and that a later step adds to or code looks at."""

from typing import Any

from torch import Tensor, nn

from lightning_replica._compat.lightning_names import pl
from lightning_replica.core import plain
from lightning_replica.core.inexact import Report
from lightning_replica.sharding.engine import CARRIED_BYTES, Engine
from lightning_replica.state.snapshot import Snapshot


def packed(trainer: pl.Trainer, state: Engine) -> bytes | None:
    """Return the gradients, packed, by name of the parameter; None if a checkpoint cannot hold them."""
    carried, strategy = state.carried_gradients(), trainer.strategy
    grids: Any = strategy.grids  # type: ignore[attr-defined]
    names = {id(parameter): name for name, parameter in trainer.lightning_module.named_parameters()}
    if carried is None or (carried and (len(grids.grids) > 1 or not all(id(each) in names for each in carried))):
        return None
    if sum(gradient.nbytes for gradient in carried.values()) > CARRIED_BYTES:
        return None
    return plain.pack({names[id(parameter)]: gradient for parameter, gradient in carried.items()})


def put(module: pl.LightningModule, state: Engine, loaded: Snapshot, report: Report) -> None:
    """Give parameters the gradients that a checkpoint holds. Report those that it lacks, if a later step needs them.

    Args:
        module: The module.
        state: The sharded state.
        loaded: What the checkpoint holds; one of another strategy or of an earlier version says nothing of gradients.
        report: Gets what is not restored.
    """
    point = loaded.replicated.point
    held = b"" if point is None else point.gradients
    if held:
        parameters, found = dict(module.named_parameters()), dict[nn.Parameter, Tensor]()
        for name, gradient in plain.unpack(held).items():
            parameter = parameters.get(name)
            if parameter is None or parameter.shape != gradient.shape:
                report(f"the gradient of {name}", "the module has no such parameter, or one of another shape", "resume")
            else:
                found[parameter] = gradient.to(parameter)  # the precision may be another one
        state.set_gradients(found)
    elif held is None:
        why = "a later step adds to them or reads them, and the checkpoint holds none: they take more than 64 MiB,"
        report("gradients", f"{why} or the model is divided among ranks, or a device has lost them", "resume")
    elif state.settings.keeps_gradients:
        why = "the checkpoint holds none, so code that looks at them before the next update finds None"
        report("gradients", why, "resume")
