"""A choice that one rank makes for all, and for whoever takes a rank's place."""

import math
from collections.abc import Callable

from lightning_replica.launch.environment import RankEnvironment
from lightning_replica.recovery.generation import Generations


class Once:
    """Has rank 0 make each choice; the others, and replacements, are told what it has chosen.

    Args:
        environment: What the supervisor has told this rank.
        rank: This rank.
    """

    def __init__(self, environment: RankEnvironment, rank: int) -> None:
        self._environment, self._rank, self._number = environment, rank, 0

    def __call__(self, choose: Callable[[], str]) -> str:
        """Return what was chosen. To be called equally often, for the same things, on all ranks.

        Raises:
            RecoveryError: If the run ends meanwhile.
        """
        self._number += 1
        key, generations = f"choice/{self._number}", Generations(self._environment.connect())
        store = generations.store
        if self._rank == 0 and not store.check([key]):
            store.set(key, choose())
        what = "rank 0 to choose a checkpoint"
        generations.wait_for(lambda: store.check([key]), self._environment.generation, math.inf, what)
        return store.get(key).decode()
