"""The user's own optimizer, applied to the pieces of a shard."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter
from typing import Any, Generic, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import TypeVar

from lightning_replica.core.grid import Grid
from lightning_replica.errors import ConfigurationError
from lightning_replica.sharding.buffers import Buffers
from lightning_replica.sharding.layout import Partition
from lightning_replica.sharding.own_attributes import Watch
from lightning_replica.sharding.piece import Piece
from lightning_replica.sharding.settings import EngineSettings
from lightning_replica.sharding.values import Values

ELEMENT_WISE: tuple[type[Optimizer], ...] = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
_REFUSED: dict[type[Optimizer], str] = {
    torch.optim.LBFGS: "it treats all parameters as one vector and evaluates the closure several times a step",
    torch.optim.SparseAdam: "it needs sparse gradients, and gradients live in flat, dense buffers",
}


def check_optimizer(optimizer: Optimizer, partition: Partition) -> None:
    """Raise an error for an optimizer that would train differently on the pieces of ``partition``.

    Raises:
        ConfigurationError: If the optimizer cannot be sharded at all, or not in this partition.
    """
    name = type(optimizer).__name__
    for refused, reason in _REFUSED.items():
        if isinstance(optimizer, refused):
            raise ConfigurationError(
                f"`replica_zero` cannot shard {name}: {reason}. Use another optimizer, or do not shard this one"
                " (`strategy='ddp'`)."
            )
    if partition == "element" and not isinstance(optimizer, ELEMENT_WISE):
        known = ", ".join(cls.__name__ for cls in ELEMENT_WISE)
        raise ConfigurationError(
            f"partition='element' cuts parameters into pieces, but {name} is not known to update every element on its"
            " own, so it might compute something else on pieces. If it updates each parameter on its own, set"
            " partition='parameter' (of the strategy or of `ReplicaOptimizer`), which keeps parameters whole."
            f" Otherwise, use one of {known} (or a subclass)."
        )


def check_disjoint(optimizers: Sequence[Optimizer]) -> None:
    """Raise an error if two optimizers hold the same parameter.

    Raises:
        ConfigurationError: If there is such a parameter.
    """
    holder: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if holder.setdefault(id(parameter), number) != number:
                    raise ConfigurationError(
                        f"Optimizers {holder[id(parameter)]} and {number} hold the same parameter of shape"
                        f" {tuple(parameter.shape)}; `replica_zero` keeps each parameter in one optimizer's buffers."
                        " Give every parameter to one optimizer."
                    )


def _has_run() -> None:
    """Take the place of the closure, which has run before the gradients were reduced."""


def _asks_for_closure(optimizer: Optimizer) -> bool:
    """Return whether ``step`` requires a closure; Lightning always passes one."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


_requires_grad = attrgetter("requires_grad")
Store = TypeVar("Store", bound=Values, default=Buffers)
"""How parameters are stored: with their gradients, or without (`replica_optimizer`)."""


class _Left(NamedTuple):
    """The shard that a fit has left in an optimizer.

    Attributes:
        cut: How it is cut.
        parameters: The pieces, by which the optimizer's state is keyed.
    """

    cut: tuple[Any, ...]
    parameters: list[nn.Parameter]


_left: "WeakKeyDictionary[Optimizer, _Left]" = WeakKeyDictionary()


class ShardedOptimizer(Generic[Store]):
    """Makes an optimizer update the pieces of this rank's shard instead of whole parameters.

    The optimizer stays the user's object: schedulers, hooks and ``param_groups[i]["lr"]`` work as before. Its param
    groups hold the module's parameters; pieces replace them only while an update runs (`swapped`). This follows
    Megatron-core's distributed optimizer (seeds 002 and 004), but with the user's optimizer instead of a wrapper.

    Args:
        optimizer: The user's optimizer.
        parameters: All parameters of the module, in registration order.
        grids: The grids that the rank is in; the second, if there is one, shards experts.
        rank: This rank.
        settings: How the state is sharded.
        store: How parameters are stored.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[nn.Parameter],
        grids: Sequence[Grid],
        rank: int,
        settings: EngineSettings,
        store: type[Store] = Buffers,  # type: ignore[assignment]
    ) -> None:
        check_optimizer(optimizer, settings.partition)
        self.optimizer = optimizer
        self._parameters = [(parameter, order) for order, parameter in enumerate(parameters)]
        self._order = {id(parameter): order for parameter, order in self._parameters}
        self._grids, self._rank, self._settings, self._store = tuple(grids), rank, settings, store
        self.buffers: list[Store] = []
        self.pieces: list[Piece] = []
        self._watch = Watch(optimizer)
        self._followed: tuple[list[int], list[bool]] | None = None  # what the param groups held: ids, what is trained
        self._step_takes: tuple[Any, ...] = (_has_run,) if _asks_for_closure(optimizer) else ()
        self._user_zero_grad = optimizer.zero_grad
        optimizer.zero_grad = self._zero_grad  # type: ignore[method-assign]
        self.follow_groups()
        self._take_over(_left.pop(optimizer, None))

    def _take_over(self, left: "_Left | None") -> None:
        """Take over the shard that an earlier fit has left in the same optimizer.

        Raises:
            ConfigurationError: If the shard was cut otherwise.
        """
        if left is None or not any(parameter in self.optimizer.state for parameter in left.parameters):
            return
        if left.cut != self._cut():
            raise ConfigurationError(
                f"The optimizer {type(self.optimizer).__name__} was used in an earlier fit, and holds one shard of its"
                " state. This fit trains other parameters, or on other ranks or with other settings. Make a new"
                " optimizer in `configure_optimizers`, or go on from a checkpoint of the earlier fit."
            )
        for before, piece in zip(left.parameters, self.pieces, strict=True):
            if before in self.optimizer.state:
                self.optimizer.state[piece.parameter] = self.optimizer.state.pop(before)

    def _cut(self) -> tuple[Any, ...]:
        """Return what shows how the shard is cut: equal values are cut alike."""
        orders = tuple(tuple(buffers.order) for buffers in self.buffers)
        shapes = tuple(tuple(piece.parameter.shape) for piece in self.pieces)
        return self._grids, self._rank, self._settings.partition, orders, shapes

    def follow_groups(self) -> tuple[list[Store], list[Store]]:
        """Lay out parameters that are in a param group but in no buffer; drop buffers that no param group uses.

        Parameters join when they are first trained: after `add_param_group`, or once unfrozen. They get buffers of
        their own, so that no state has to move between ranks.

        Returns:
            The new buffers, and the dropped ones.
        """
        parameters = list(chain.from_iterable(group["params"] for group in self.optimizer.param_groups))
        found = list(map(id, parameters)), list(map(_requires_grad, parameters))
        if found == self._followed:
            return [], []
        listed = dict(zip(found[0], parameters, strict=True))
        known = {id(p) for buffers in self.buffers for p in buffers.parameters}
        missing = [p for p in listed.values() if p.requires_grad and id(p) not in known]
        gone = [buffers for buffers in self.buffers if not any(id(p) in listed for p in buffers.parameters)]
        new: list[Store] = []
        if missing or gone:
            new = self._replace(gone, self._lay_out(sorted(missing, key=lambda p: self._order.get(id(p), -1))))
        self._followed = found
        return new, gone

    def admit(self, parameters: Iterable[nn.Parameter]) -> None:
        """Count ``parameters`` among those of the module, after all others, so that a param group may hold them."""
        for parameter in parameters:
            if id(parameter) not in self._order:
                self._order[id(parameter)] = len(self._parameters)
                self._parameters.append((parameter, len(self._parameters)))

    def follow_layout(self, layout: Sequence[Sequence[int]]) -> tuple[list[Store], list[Store]]:
        """Do what `follow_groups` does, but lay out the buffers that a peer has. For replacements.

        Args:
            layout: For every buffer of the peer, the positions of its parameters in the module.
        """
        parameters = {order: p for p, order in self._parameters}
        gone = [buffers for buffers in self.buffers if list(buffers.order) not in [list(each) for each in layout]]
        kept = [list(buffers.order) for buffers in self.buffers if buffers not in gone]
        new = [b for each in layout if list(each) not in kept for b in self._lay_out([parameters[i] for i in each])]
        return self._replace(gone, new), gone

    def _replace(self, gone: list[Store], new: list[Store]) -> list[Store]:
        self._followed = None
        self.buffers = [buffers for buffers in self.buffers if buffers not in gone] + new
        for piece in self.pieces:
            if piece.buffers in gone:
                self.optimizer.state.pop(piece.parameter, None)
        kept = [piece for piece in self.pieces if piece.buffers not in gone]
        self.pieces = kept + [Piece(self.optimizer, buffers, where) for buffers in new for where in buffers.pieces]
        for parameter in (p for buffers in new for p in buffers.parameters):
            if parameter in self.optimizer.state:  # some optimizers make their state at construction (Adagrad)
                self.put_state(parameter, self.optimizer.state.pop(parameter))
        return new

    def _lay_out(self, parameters: Sequence[nn.Parameter]) -> list[Store]:
        kinds: dict[tuple[Grid, torch.dtype, torch.device], list[nn.Parameter]] = {}
        for parameter in parameters:
            if id(parameter) not in self._order:
                raise ConfigurationError(
                    f"The optimizer {type(self.optimizer).__name__} holds a parameter of shape"
                    f" {tuple(parameter.shape)} that is not one of the LightningModule's. Register it as an attribute."
                )
            if not parameter.is_floating_point():
                raise ConfigurationError(
                    f"A trained parameter has dtype {parameter.dtype}; `replica_zero` shards floating-point parameters."
                    " Use its real view (`torch.view_as_real`) as parameter, or freeze it."
                )
            grid = self._grids[self._order[id(parameter)] in self._settings.experts]
            kinds.setdefault((grid, parameter.dtype, parameter.device), []).append(parameter)
        return [
            self._store(grid, self._rank, members, [self._order[id(p)] for p in members], self._settings)
            for (grid, *_), members in kinds.items()
        ]

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Put pieces in place of whole parameters in the param groups. A group without pieces on this rank is empty."""
        own: dict[int, list[nn.Parameter]] = {}
        for piece in self.pieces:
            own.setdefault(id(piece.whole), []).append(piece.parameter)
        wholes = [group["params"] for group in self.optimizer.param_groups]
        for group, params in zip(self.optimizer.param_groups, wholes, strict=True):
            group["params"] = [part for whole in params for part in own.get(id(whole), ())]
        try:
            yield
        finally:
            for group, params in zip(self.optimizer.param_groups, wholes, strict=True):
                group["params"] = params

    def position(self, parameter: nn.Parameter) -> int:
        """Return the position of one of the module's parameters, in registration order."""
        return self._order[id(parameter)]

    def wholes(self) -> dict[int, Tensor]:
        """Return all parameters by position, as whole views into ``params``."""
        return {
            order: buffers.whole(index, buffers.params)
            for buffers in self.buffers
            for index, order in enumerate(buffers.order)
        }

    def main_dtypes(self) -> dict[int, torch.dtype]:
        """Return the dtype of main parameters by position, where it is not the parameter's."""
        wide = [buffers for buffers in self.buffers if buffers.main.dtype != buffers.params.dtype]
        return {order: buffers.main.dtype for buffers in wide for order in buffers.order}

    def forget_main(self) -> None:
        """Make every main parameter differ from its parameter."""
        for buffers in self.buffers:
            buffers.main.fill_(torch.nan)  # NaN equals nothing, so `main_from_params` keeps none of it

    def main_from_params(self) -> None:
        """Take the shard's values from the parameters, where they differ."""
        for buffers in self.buffers:
            buffers.main_from_params()

    def drop_gradients(self) -> None:
        """Remove the gradient of every parameter."""
        for buffers in self.buffers:
            buffers.drop_gradients()

    def update(self, prepare: Callable[[list[Tensor]], None], **kwargs: Any) -> None:
        """Make one optimizer step on the shard; parameters without a gradient on any rank are left out.

        Args:
            prepare: Called with the gradients, in 32 bits where parameters have 16, to scale or clip them in place.
            **kwargs: Further arguments of the optimizer's ``step``.
        """
        for piece in self.pieces:
            piece.parameter.grad = piece.buffers.gradient_of(piece.where) if piece.used else None
        prepare([piece.parameter.grad for piece in self.pieces if piece.parameter.grad is not None])
        with self.swapped(), self._watch.update():
            self.optimizer.step(*self._step_takes, **kwargs)  # schedulers have wrapped this method since
        for piece in self.pieces:
            piece.parameter.grad = None

    def unseen_attributes(self) -> list[str]:
        """Return the names of attributes of which not all is looked at for changes; each once."""
        return self._watch.unseen()

    def lost_attributes(self) -> list[str]:
        """Return the names of attributes that updates have written, and that are neither sent nor saved; each once."""
        return self._watch.lost()

    # State, piece by piece

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the optimizer state of all pieces: what the update depends on besides the shard's values.

        Returns:
            ``{"<piece>/<key>": tensor}`` with every tensor as the optimizer holds it, so that writing into one writes
            into the optimizer, and plain scalars, named in the same way.
        """
        tensors: dict[str, Tensor] = {}
        scalars: dict[str, Any] = {}
        for number, piece in enumerate(self.pieces):
            for key, value in self.optimizer.state.get(piece.parameter, {}).items():
                (tensors if isinstance(value, Tensor) else scalars)[f"{number}/{key}"] = value
        return tensors, scalars

    def prepare_state(
        self, shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], scalars: Mapping[str, Any]
    ) -> None:
        """Make the optimizer's state as a peer describes it; its tensors are uninitialised, to be received into."""
        for piece in self.pieces:
            self.optimizer.state.pop(piece.parameter, None)
        for name, (dtype, shape) in shapes.items():
            parameter, key = self._owner(name)
            self.optimizer.state[parameter][key] = torch.empty(shape, dtype=dtype, device=parameter.device)
        for name, value in scalars.items():
            parameter, key = self._owner(name)
            self.optimizer.state[parameter][key] = value

    def load_state(self, state: Mapping[int, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
        """Load state and hyperparameters through the optimizer's own ``load_state_dict``: its casts and hooks apply.

        Args:
            state: State by number of the piece; that of pieces which no param group holds any more is left out.
            groups: Hyperparameters of every param group.
        """
        numbers = {id(piece.parameter): number for number, piece in enumerate(self.pieces)}
        with self.swapped():
            numbered = [
                {**saved, "params": [numbers[id(parameter)] for parameter in group["params"]]}
                for saved, group in zip(groups, self.optimizer.param_groups, strict=True)
            ]
            listed = {number for group in numbered for number in group["params"]}
            kept = {number: dict(entries) for number, entries in state.items() if number in listed}
            self.optimizer.load_state_dict({"state": kept, "param_groups": numbered})

    def put_state(self, parameter: nn.Parameter, state: Mapping[str, Any]) -> None:
        """Cut the state of a whole parameter into the state of the pieces that this rank holds."""
        for piece in self.pieces:
            if piece.whole is parameter:
                self.optimizer.state[piece.parameter] = {key: piece.cut(key, value) for key, value in state.items()}

    def close(self) -> None:
        """Restore the optimizer's own ``zero_grad``, and leave the shard for a fit with the same optimizer."""
        self.optimizer.zero_grad = self._user_zero_grad  # type: ignore[method-assign]
        _left[self.optimizer] = _Left(self._cut(), [piece.parameter for piece in self.pieces])

    def _owner(self, name: str) -> tuple[nn.Parameter, str]:
        number, key = name.split("/", 1)
        return self.pieces[int(number)].parameter, key

    def _zero_grad(self, *args: Any, **kwargs: Any) -> None:
        if type(self.optimizer).zero_grad is not Optimizer.zero_grad:  # it may do more, and take less
            self._user_zero_grad(*args, **kwargs)
        set_to_none = args[0] if args else kwargs.get("set_to_none", True)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad = parameter.grad.detach().zero_()
        for buffers in self.buffers:
            buffers.zero_accumulated(set_to_none)


def scale_gradients(optimizer: ShardedOptimizer, factor: float) -> None:
    """Multiply the whole gradient of an optimizer by ``factor``."""
    for buffers in optimizer.buffers:
        buffers.scale_gradients(factor)


def buffers_of(optimizers: Iterable[ShardedOptimizer]) -> list[Buffers]:
    """Return the buffers of all ``optimizers``, in order."""
    return [buffers for optimizer in optimizers for buffers in optimizer.buffers]


def shard_optimizers(
    optimizers: Sequence[Optimizer],
    parameters: Sequence[nn.Parameter],
    grids: Sequence[Grid],
    rank: int,
    settings: EngineSettings,
) -> list[ShardedOptimizer]:
    """Shard all optimizers of a fit. The arguments are those of `ShardedOptimizer`.

    Raises:
        ConfigurationError: If there is nothing to train, or two optimizers hold one parameter.
    """
    check_disjoint(optimizers)
    sharded = [ShardedOptimizer(optimizer, parameters, grids, rank, settings) for optimizer in optimizers]
    if not any(each.buffers for each in sharded):
        raise ConfigurationError(
            "There is no parameter to train: no optimizer holds one with requires_grad=True."
            " Check `configure_optimizers` and what was frozen."
        )
    return sharded
