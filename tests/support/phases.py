"""A user's script in which a process fails in a phase outside of training; run as `python phases.py PHASE ACT RANK`."""

import os
import signal
import sys
import time

PHASE, ACT, RANK = sys.argv[1], sys.argv[2], int(sys.argv[3])


def reach(phase: str) -> None:
    """Fails if this is the place."""
    if phase != PHASE or int(os.environ.get("LOCAL_RANK", "-1")) != RANK:
        return
    print(f"here {os.getpid()}", flush=True)
    if ACT == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if ACT == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if ACT == "raise":
        raise ValueError(f"a mistake in {phase}")
    if ACT == "exit":
        sys.exit(3)
    if ACT == "sleep":
        time.sleep(1e6)


reach("import")

import lightning as L  # noqa: E402
from lightning.pytorch.callbacks import Callback, ModelCheckpoint  # noqa: E402
from lightning.pytorch.demos.boring_classes import BoringModel  # noqa: E402

import lightning_replica  # noqa: E402


class Phases(Callback):
    def setup(self, *_: object, **__: object) -> None:
        reach("setup")

    def on_train_start(self, *_: object) -> None:
        reach("train_start")

    def on_save_checkpoint(self, *_: object) -> None:
        reach("save")

    def teardown(self, *_: object, **__: object) -> None:
        reach("teardown")


def main() -> None:
    reach("script")
    least, most = float(os.environ.get("HANG_MIN_S", "60")), float(os.environ.get("HANG_MAX_S", "1800"))
    trainer = L.Trainer(
        strategy=lightning_replica.ReplicaZeroStrategy(hang_min_s=least, hang_max_s=most),
        accelerator="cpu",
        devices=2,
        max_steps=2,
        limit_val_batches=1,
        callbacks=[Phases(), ModelCheckpoint("checkpoints")],
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    reach("trainer")
    trainer.fit(BoringModel())
    reach("after")
    print(f"rank {trainer.global_rank} is done", flush=True)


if __name__ == "__main__":
    main()
