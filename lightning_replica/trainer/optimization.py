"""Lightning's loops of one training step, as far as the sharded step changes them."""

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, cast

from lightning_replica._compat.lightning_names import Closure, _AutomaticOptimization, _ManualOptimization
from lightning_replica.errors import ProtocolError

if TYPE_CHECKING:
    from lightning_replica.trainer.strategy import ReplicaZeroStrategy


class ReplicaOptimization(_AutomaticOptimization):
    """`_AutomaticOptimization` that keeps the closure under way, so that its result can be read."""

    closure: Closure | None = None

    def _make_closure(self, kwargs: "OrderedDict[str, Any]", optimizer: Any, batch_idx: int) -> Closure:
        self.closure = super()._make_closure(kwargs, optimizer, batch_idx)
        return self.closure

    def output(self) -> dict[str, Any]:
        """Return what the closure has returned."""
        if self.closure is None or self.closure._result is None:
            raise ProtocolError("The commit was entered before the closure had run.")
        return self.closure._result.asdict()


class ReplicaManualOptimization(_ManualOptimization):
    """`_ManualOptimization` that commits once the training step, with all its optimizer steps, is done."""

    def run(self, kwargs: "OrderedDict[str, Any]") -> dict[str, Any]:
        """Run one training step and end its batch."""
        output: dict[str, Any] = super().run(kwargs)
        cast("ReplicaZeroStrategy", self.trainer.strategy).training.end_manual_batch(output)
        return output
