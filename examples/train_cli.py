"""The strategy in a LightningCLI.

python examples/train_cli.py fit --config examples/train_cli.yaml
python examples/train_cli.py fit --config examples/train_cli.yaml --trainer.strategy.init_args.replicas=4 \
    --trainer.devices=8
python examples/train_cli.py fit --trainer.strategy.help=lightning_replica.ReplicaZeroStrategy
"""

from gpt import GPT, TextData, fingerprint
from lightning.pytorch.cli import LightningCLI


def main() -> None:
    """Train as the command line and its YAML file specify."""
    cli = LightningCLI(GPT, TextData)
    if cli.trainer.is_global_zero:
        print(f"fingerprint {fingerprint(cli.model)}")


if __name__ == "__main__":
    main()
