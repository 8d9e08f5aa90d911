"""Streams of different lengths: ranks whose stream has ended go on beside the others, until the last one ends.

python examples/uneven_inputs.py                     # train
python examples/uneven_inputs.py --kill 0 --at 9     # rank 0 kills itself when it has no inputs any more
"""

import argparse
from collections.abc import Iterator

import lightning as L
from gpt import GPT, Kill, Text, fingerprint
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

from lightning_replica import JoinCallback, ReplicaZeroStrategy


class Stream(IterableDataset[Tensor]):
    """Windows of text without a length, more of them for each further rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[Tensor]:
        text = Text(length=64)
        return (text[1000 * self.rank + number] for number in range(12 + 8 * self.rank))


class UnevenGPT(GPT):
    """The GPT, with its own data. It logs at the end of the epoch, because no rank can wait for all in each step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = functional.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(batch))
        return loss

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Stream(self.global_rank), batch_size=4)


class Count(JoinCallback):
    """Counts the steps that a rank has made without inputs."""

    def __init__(self) -> None:
        self.shadowed = 0

    def on_shadow_step(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.shadowed += 1

    def on_join_end(self, trainer: L.Trainer, pl_module: L.LightningModule, is_last_joiner: bool) -> None:
        print(f"rank {trainer.global_rank}: {self.shadowed} of {trainer.global_step} steps without inputs", flush=True)

    def state_dict(self) -> dict[str, int]:
        return {"shadowed": self.shadowed}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.shadowed = state_dict["shadowed"]


def main() -> None:
    """Train, and print the result."""
    parser = argparse.ArgumentParser(description="Trains a GPT on streams of different lengths.")
    parser.add_argument("--devices", type=int, default=2, help="number of ranks")
    parser.add_argument("--width", type=int, default=320, help="width of the model, a multiple of 5")
    parser.add_argument("--depth", type=int, default=8, help="layers of the model")
    parser.add_argument("--kill", type=int, metavar="RANK", help="rank that kills itself; 0 is allowed")
    parser.add_argument("--at", type=int, default=9, metavar="STEP", help="when that happens")
    args = parser.parse_args()
    L.seed_everything(1, verbose=False)
    model = UnevenGPT(args.width, args.depth)
    trainer = L.Trainer(
        strategy=ReplicaZeroStrategy(uneven_inputs="join"),
        accelerator="cpu",
        devices=args.devices,
        max_epochs=2,
        gradient_clip_val=1.0,
        callbacks=[Count(), *([Kill(args.kill, args.at)] if args.kill is not None else [])],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model)
    if trainer.is_global_zero:
        print(f"loss {float(trainer.callback_metrics['loss']):.6f}  weights {fingerprint(model)}")


if __name__ == "__main__":
    main()
