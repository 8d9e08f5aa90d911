"""Parameters that no optimizer trains but user code writes to, such as a teacher or a momentum encoder.

No shard holds them, so a rank that goes back to a snapshot has to restore them itself. Most never change (a frozen
backbone, a model to which adapters are added), and they may be large. So only those that have been seen to change are
copied. torch counts writes, but not those through ``.data``, which momentum encoders use. So a few elements of each
parameter are compared, too: of all parameters in the first windows, and of some in every later window.

In the first windows all are copied, if together they take no more than `_COPIED_BYTES`, because a teacher usually
changes from the first step on. If a parameter that was not copied turns out to have changed since the snapshot, the run
ends with an error, because it would not be exact.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from lightning_replica._compat.dtensor import local_of
from lightning_replica._compat.torch import write_count
from lightning_replica.core.plain import is_plain
from lightning_replica.devices.host import same_bits
from lightning_replica.errors import RecoveryError

FrozenValues: TypeAlias = list[tuple[nn.Parameter, Tensor]]
"""Parameters, each with a flat copy of what it held."""

_FIRST = 3  # windows
_SOME = 4  # parameters that are compared in one window
_ELEMENTS = 4096  # elements of a parameter that are compared
_COPIED_BYTES = 2**30


class FrozenCopies:
    """Copies of parameters that no shard holds, kept from one snapshot to the next.

    Args:
        trained: Returns the parameters that shards hold.
    """

    def __init__(self, trained: Callable[[], Sequence[nn.Parameter]]) -> None:
        self._trained = trained
        self._watched: list[_Watched] = []
        self._windows, self._turn = 0, 0
        self._few = True

    def take(self, parameters: Sequence[nn.Parameter], window: bool) -> FrozenValues:
        """Return copies of the parameters that change.

        Args:
            parameters: All parameters of the module.
            window: Whether a window of batches begins. Changes are looked for only then, because in the middle of a
                step most parameters have not changed yet.
        """
        trained = self._trained()
        if len(parameters) == len(trained):
            self._watched = []
            return []
        self._find(parameters, trained)
        if window:
            self._windows += 1
            self._look()
        return [(watched.parameter, watched.value()) for watched in self._watched if self._copies(watched)]

    def put_back(self, values: FrozenValues) -> None:
        """Restore the values that `take` has copied.

        Raises:
            RecoveryError: If a parameter that was not copied has changed since.
        """
        copied = {id(parameter) for parameter, _ in values}
        lost = [w for w in self._watched if id(w.parameter) not in copied and w.has_changed()]
        if lost:
            raise RecoveryError(
                f"A parameter of shape {tuple(lost[0].parameter.shape)} that no optimizer trains, one of {len(lost)},"
                " has been written to for the first time since the step began, and its former content is lost. Write to"
                " it from the first step on, or keep it in a buffer."
            )
        with torch.no_grad():
            for parameter, value in values:
                own = local_of(parameter)
                own.copy_(value.view(own.shape))

    def _copies(self, watched: "_Watched") -> bool:
        return watched.follows or (self._windows <= _FIRST and self._few)

    def _find(self, parameters: Sequence[nn.Parameter], trained: Iterable[nn.Parameter]) -> None:
        held = {id(parameter) for parameter in trained}
        known = {id(watched.parameter): watched for watched in self._watched}
        found = [parameter for parameter in parameters if id(parameter) not in held and _is_known(local_of(parameter))]
        if [id(parameter) for parameter in found] != list(known):
            self._watched = [known.get(id(parameter)) or _Watched(parameter) for parameter in found]
        self._few = sum(local_of(parameter).nbytes for parameter in found) <= _COPIED_BYTES

    def _look(self) -> None:
        still = [watched for watched in self._watched if not watched.follows]
        self._turn += _SOME
        some = [still[(self._turn + place) % len(still)] for place in range(min(_SOME, len(still)))]
        if self._windows <= _FIRST or any(watched.is_written() for watched in still):
            some = still
        if any(watched.has_changed() for watched in some):
            some = still
            for watched in still:
                watched.follows = watched.has_changed()
        for watched in some:
            watched.remember()
        if self._windows == _FIRST + 1:
            for watched in still:
                watched.forget()


def _is_known(parameter: Tensor) -> bool:
    """Return whether elements can be compared; in other classes (quantized weights), their meaning is unknown."""
    return type(parameter) in (nn.Parameter, Tensor) and is_plain(parameter)


class _Watched:
    """A parameter that is watched for changes.

    Attributes:
        parameter: The parameter.
        follows: Whether it has been seen to change.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter, self.follows = parameter, False
        self._value: Tensor | None = None
        self._place = 0
        self.remember()

    @property
    def _values(self) -> Tensor:
        return local_of(self.parameter)

    def is_written(self) -> bool:
        """Return whether torch has counted a write since `remember`."""
        return write_count(self._values) != self._writes

    def has_changed(self) -> bool:
        """Return whether a change since `remember` can be seen."""
        return self.is_written() or not same_bits(self._sample(), self._seen)

    def remember(self) -> None:
        """Note the current value for later comparisons, which look at another place of the parameter from now on."""
        self._writes = write_count(self._values)
        self._place = (self._place + _ELEMENTS) % max(1, self._values.numel() - _ELEMENTS)
        self._seen = self._sample().clone()

    def value(self) -> Tensor:
        """Return a flat copy of the parameter."""
        flat = self._values.detach().reshape(-1)
        if self._value is None or not same_bits(self._value, flat):
            self._value = flat.clone()
        return self._value

    def forget(self) -> None:
        """Drop the copy, unless the parameter has been seen to change."""
        if not self.follows:
            self._value = None

    def _sample(self) -> Tensor:
        return self._values.detach().reshape(-1)[self._place : self._place + _ELEMENTS]
