"""Ranks whose memory counts as a device's: not mapped by others, collectives are put in order, shards go by buffers.

The tensors are the CPU's all the same, so the bits must be those of ranks that know nothing of this.
"""

from pathlib import Path
from typing import Any

import lightning as L
import pytest

from tests.support import job, world
from tests.support.job import Case, Fault

FAULTS = [
    (),
    (Fault("kill", 1, "backward", 2),),
    (Fault("kill", 0, "reduction", 3),),
    (Fault("kill", 3, "gather", 2), Fault("exception", 0, "forward", 4)),
    (Fault("exception", 2, "reduction", 1),),
    (Fault("exit", 0, "after_commit", 2), Fault("exit", 3, "after_commit", 2)),
    (Fault("corrupt", 1, "batch_start", 2),),
    (Fault("kill", 1, "backward", 2), Fault("kill", 0, "repair", 2)),
]


class Look(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        assert not strategy.state.gradients.is_mapped, "another rank has mapped the device's memory"


def run(case: Case, out: Path) -> None:
    job.run(case, out, callbacks=(Look(),))


@pytest.mark.parametrize("faults", FAULTS, ids=str)
def test_the_same_bits(faults: tuple[Fault, ...], untouched: world.Outcome, tmp_path: Path) -> None:
    outcome = world.run(Case(faults, accelerator="apart"), tmp_path, target=run)
    outcome.assert_same(untouched)
    assert all((tmp_path / f"fired{number}").exists() for number in range(len(faults)))
    assert bool(faults) == ("recovered at step" in outcome.logs)
