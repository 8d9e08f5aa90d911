"""For examples, which find it on the search path: a rank that dies once there is a standby, and tells if it was one."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import gpt  # type: ignore[import-not-found]  # of examples


class Kill(gpt.Kill):  # type: ignore[misc]
    """Kills its rank once ``standby`` processes wait beside the ranks."""

    def __init__(self, rank: int, step: int, standby: int) -> None:
        super().__init__(rank, step)
        self.standby = standby

    def on_before_optimizer_step(self, trainer: Any, *args: Any) -> None:
        if (trainer.global_rank, trainer.global_step) == (self.rank, self.step):
            supervisor = os.getppid()
            children = Path(f"/proc/{supervisor}/task/{supervisor}/children")
            while len(children.read_text().split()) < trainer.world_size + self.standby:
                time.sleep(0.01)
        super().on_before_optimizer_step(trainer, *args)

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        if sys.orig_argv[1] == "-c":
            print(f"rank {trainer.global_rank} was a standby", flush=True)
