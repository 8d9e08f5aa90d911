"""What may train otherwise here than under DDP, said when a fit begins.

Under DDP every rank has whole gradients, whole parameters in the optimizer, and the updated weights as soon as ``step``
returns. Here the optimizer has the pieces of a shard, and weights are gathered after ``step``. What relies on more than
that cannot be refused, as it may not matter. So it is named.
"""

import inspect
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

from torch.optim import Optimizer

from lightning_replica._compat.lightning_names import pl
from lightning_replica._compat.torch import step_hooks_of
from lightning_replica.sharding.engine import ELEMENT_WISE, Partition
from lightning_replica.state.reachable import GRADIENTS_BYTES

_SHOWN = 3


def differences_from_ddp(
    module: pl.LightningModule, optimizers: Sequence[Optimizer], partition: Partition, reader_of_states: str | None
) -> Iterator[str]:
    """Yield what may train otherwise than under DDP, as sentences.

    Args:
        module: The module that is trained.
        optimizers: The user's optimizers, all of them.
        partition: How parameters are cut.
        reader_of_states: The name of a function of the user's that may look at the state of an optimizer.
    """
    if reader_of_states is not None:
        yield (
            f"`{reader_of_states}` may look at the state of an optimizer. Each rank has the states of its pieces:"
            " `state[parameter]` is empty, and what code writes to them does not go back with a batch that is done"
            " again."
        )
    trained = {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    left = [name for name, each in module.named_parameters() if each.requires_grad and id(each) not in trained]
    if left:
        shown = ", ".join(left[:_SHOWN]) + (f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else "")
        yield (
            f"no optimizer of `configure_optimizers` has {shown}: gradients of such parameters are not averaged over"
            " ranks, as DDP does. If your code updates them, ranks drift apart; if not, set requires_grad=False."
        )
        if sum(module.get_parameter(name).nbytes for name in left) > GRADIENTS_BYTES:
            yield f"the gradients of {shown} are too large to go back after a fault."
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if any(step_hooks_of(optimizer)):
            yield (
                f"{name} has hooks of `register_step_pre_hook` or `register_step_post_hook`. They see this rank's"
                " shard, and weights before they are gathered; what they write to weights is lost. Use"
                " `on_before_zero_grad` or `on_train_batch_end`."
            )
        if partition == "element" and _overrides_step(type(optimizer)):
            yield (
                f"{name} overrides `step`, which gets pieces of parameters. If it uses a parameter as a whole (its"
                " norm, its shape), set partition='parameter'."
            )
        methods = ", ".join(f"`{each}`" for each in _methods_that_use_state(type(optimizer)))
        if methods:
            yield (
                f"{methods} of {name} may use its state, of which each rank has a shard only: outside of `step`,"
                " `state[parameter]` is empty here."
            )


def _overrides_step(cls: type[Optimizer]) -> bool:
    """Return whether the user's class computes updates by itself."""
    base = next(each for each in cls.__mro__ if each in ELEMENT_WISE) if issubclass(cls, ELEMENT_WISE) else cls
    return inspect.unwrap(cls.step) is not inspect.unwrap(base.step)


def _methods_that_use_state(cls: type[Optimizer]) -> list[str]:
    known = dir(Optimizer)
    found: dict[str, Any] = {}
    for each in cls.__mro__:
        if each.__module__.partition(".")[0] != "torch":
            found = {**vars(each), **found}
    return [
        name
        for name, method in found.items()
        if name not in known and not name.startswith("_") and isinstance(method, FunctionType) and _names_state(method)
    ]


def _names_state(function: FunctionType) -> bool:
    ahead: list[CodeType] = [function.__code__]
    while ahead:
        code = ahead.pop()
        if "state" in code.co_names:
            return True
        ahead += [each for each in code.co_consts if isinstance(each, CodeType)]
    return False
