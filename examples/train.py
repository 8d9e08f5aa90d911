"""The strategy in a plain script.

python examples/train.py
python examples/train.py --devices 8 --replicas 4
"""

import argparse

import lightning as L
from gpt import GPT, Say, TextData, fingerprint

from lightning_replica import ReplicaZeroStrategy


def main() -> None:
    """Train a small GPT."""
    parser = argparse.ArgumentParser(description="Trains a small GPT with `replica_zero`.")
    parser.add_argument("--devices", type=int, default=4, help="number of ranks")
    parser.add_argument("--replicas", type=int, default=2, help="copies of the optimizer state")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=320, help="width of the model, a multiple of 5")
    parser.add_argument("--depth", type=int, default=8, help="layers of the model")
    args = parser.parse_args()

    L.seed_everything(1, verbose=False)
    model = GPT(args.width, args.depth)
    trainer = L.Trainer(
        strategy=ReplicaZeroStrategy(replicas=args.replicas),
        accelerator="cpu",
        devices=args.devices,
        max_steps=args.steps,
        gradient_clip_val=1.0,
        callbacks=[Say(every=5)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, TextData())
    if trainer.is_global_zero:
        print(f"fingerprint {fingerprint(model)}")


if __name__ == "__main__":
    main()
