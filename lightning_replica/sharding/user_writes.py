"""Finds weights that user code has written to, in any hook and in any way, so that they are taken into the shards.

torch counts writes to a parameter, and knows where its memory is. Writes through ``.data`` into the same memory it does
not count. So the weights of the own shard are also compared with the shard's values: as a whole in the first steps,
where user code is known to write weights, and from the first such write on; a part of them in each other step, so that
all have been compared after some steps. A write that is found that late has been dropped in the steps before. It is
reported.
"""

from collections.abc import Sequence
from typing import Final

from torch import Tensor, nn

from lightning_replica._compat.dtensor import is_divided, local_of
from lightning_replica._compat.torch import data_version
from lightning_replica.core.inexact import Report
from lightning_replica.devices.host import same_bits
from lightning_replica.sharding.buffers import Buffers
from lightning_replica.sharding.layout import Range
from lightning_replica.sharding.values import part_of

FIRST_STEPS: Final = 3
_PART: Final = 1 << 14  # elements that are compared in one step


class UserWrites:
    """Sees whether user code has written to weights since it was last asked.

    Args:
        report: Called when a write was found late.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self._marks: tuple[list[int], list[int]] = [], []
        self._of: list[Buffers] = []
        self._parameters: list[nn.Parameter] = []
        self._divided = False
        self._follows = False
        self._turn = 0

    def found(self, buffers: Sequence[Buffers], step: int, certain: bool, in_part: bool = True) -> bool:
        """Return whether weights differ from the values of the shard.

        Args:
            buffers: The flat buffers that hold the weights.
            step: The step.
            certain: Whether everything is compared.
            in_part: Whether a part is compared otherwise.
        """
        marked = self._have_marks_changed(buffers)
        if marked or certain or self._follows or step < FIRST_STEPS:
            for each in buffers:
                each.reclaim()
            found = not all(each.is_params() for each in buffers)
            # Of weights that torch has seen being written to, the next write will be seen as well.
            self._follows = self._follows or (found and not marked)
            return found
        late = in_part and self._differs_in_part(buffers)
        if late:
            self._follows = True
            self._report(
                "the weights",
                "user code has written to them in a way that torch does not count, and that was seen only now, in step"
                f" {step}: in up to {_parts_of(buffers)} steps before, such writes were lost. From now on they count",
                "once",
            )
        return late

    def _have_marks_changed(self, buffers: Sequence[Buffers]) -> bool:
        if list(buffers) != self._of:
            self._of = list(buffers)
            self._parameters = [parameter for each in buffers for parameter in each.parameters]
            self._divided = any(map(is_divided, self._parameters))
        own = list(map(local_of, self._parameters)) if self._divided else self._parameters
        marks = list(map(data_version, own)), list(map(Tensor.data_ptr, own))
        changed = marks != self._marks
        self._marks = marks
        return changed

    def _differs_in_part(self, buffers: Sequence[Buffers]) -> bool:
        """Compare the part whose turn it is with the shard."""
        parts = _parts_of(buffers)
        if not parts:
            return False
        self._turn = (self._turn + 1) % parts
        left = self._turn
        for each in buffers:
            for world, local in each.shard_ranges():
                if left < _parts_in(world):
                    part = slice(left * _PART, (left + 1) * _PART)
                    params, main = part_of(each.params, world)[part], part_of(each.main, local)[part]
                    return not same_bits(params, main.to(params.dtype))
                left -= _parts_in(world)
        return False


def _parts_of(buffers: Sequence[Buffers]) -> int:
    """Return in how many parts the own shard is compared."""
    return sum(_parts_in(world) for each in buffers for world, _ in each.shard_ranges())


def _parts_in(where: Range) -> int:
    return -(-(where.stop - where.start) // _PART)
