"""What moves to a replacement arrives damaged: it is asked for again, from another peer if there is one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_replica.recovery.transfer import Channel
from tests.support import job, world
from tests.support.job import Case, Fault


@dataclass
class Damaged(Case):
    """Rank ``by`` sends its first ``times`` chunks with a flipped bit."""

    by: int = 0
    times: float = 0


def train(case: Damaged, out: Path) -> None:
    launch, done = Channel._launch, 0

    def damage(self: Channel, tensor: torch.Tensor, root: int) -> Any:
        nonlocal done
        if root == self._source == case.by and tensor.dtype == torch.uint8 and done < case.times:
            done += 1
            tensor = tensor.clone()
            tensor[len(tensor) // 2] ^= 1
        return launch(self, tensor, root)

    Channel._launch = damage  # type: ignore[method-assign]
    job.run(case, out)


KILLED = Fault("kill", 1, "backward", 2)


def test_a_damaged_chunk_leaves_no_trace(untouched: world.Outcome, tmp_path: Path) -> None:
    outcome = world.run(Damaged((KILLED,), by=3, times=2), tmp_path, target=train)
    outcome.assert_same(untouched)
    assert outcome.logs.count("arrived damaged, attempt 1 of 3") == 1
    assert outcome.logs.count("arrived damaged, attempt 2 of 3") == 1
    assert outcome.logs.count("recovered at step") == 1


def test_another_peer_is_asked(tmp_path: Path) -> None:
    untouched = world.run(Case(devices=3, replicas=3), tmp_path / "untouched")
    outcome = world.run(Damaged((KILLED,), 3, 3, by=0, times=1e9), tmp_path / "damaged", target=train)
    outcome.assert_same(untouched)
    assert outcome.logs.count("arrived damaged, attempt 3 of 3") == 1  # then rank 2 is asked


def test_nobody_else_can_be_asked(tmp_path: Path) -> None:
    outcome = world.run(Damaged((KILLED,), by=3, times=1e9, max_tries=2), tmp_path, target=train)
    assert outcome.code != 0
    assert " Rank 1 failed to get its shard 2 times, from ranks 3, 3: 1 chunks of message 1" in outcome.logs
