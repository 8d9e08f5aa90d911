"""The scripts: what they are called and how they are started."""

import random
from pathlib import Path

from tests.wild.harness import Script

_CLI = ("--trainer.strategy={strategy}", "--trainer.accelerator=cpu", "--trainer.devices=2", "--seed_everything=7")


def _text(work: Path) -> None:
    """Where Lightning's demo looks for what it would download otherwise."""
    words = random.Random(1)
    lines = [" ".join(f"w{words.randrange(200)}" for _ in range(20)) for _ in range(70)]
    (work / "data").mkdir()
    (work / "data" / "wikitext-2.txt").write_text("\n".join(lines) + "\n")


SCRIPTS = {
    "boring": Script("scripts/demo_boring.py"),
    "transformer": Script("scripts/demo_transformer.py", prepare=_text),
    "lstm": Script("scripts/demo_lstm.py", prepare=_text),
    "manual": Script("scripts/demo_manual.py"),
    "cli": Script("scripts/cli.py", ("fit", *_CLI, "--trainer.max_epochs=3")),
    "cli_no_run": Script("scripts/cli_no_run.py", ("--model=BoringModel", "--data=BoringDataModule", *_CLI)),
    "hydra": Script("hydra_project/src/train.py", ("trainer.strategy={strategy}",)),
    "hydra_workers": Script("hydra_project/src/train.py", ("trainer.strategy={strategy}", "data.num_workers=2")),
    "language": Script("scripts/language.py", packages=("WITH_TRANSFORMERS",)),
    "neuralforecast": Script("scripts/with_neuralforecast.py", packages=("WITH_NEURALFORECAST",), forked=False),
    "darts": Script("scripts/with_darts.py", packages=("WITH_DARTS",), forked=False),
    "metrics": Script("scripts/metrics.py"),
    "callbacks": Script("scripts/callbacks.py", varies="Timer|DeviceStats"),
    "averaging": Script("scripts/averaging.py"),
    "swa": Script("scripts/swa.py"),
    "teacher": Script("scripts/teacher.py"),
    # DDP lets ranks go apart where parameters are frozen when it begins.
    "finetuning": Script("scripts/finetuning.py", ddp="."),
    "pruning": Script("scripts/pruning.py"),
    "loggers": Script("scripts/loggers.py", packages=("WITH_LOGGERS",), varies=r"wandb/.*\.(log|json|yaml|txt)"),
    "rich_bar": Script("scripts/bars.py", ("RichProgressBar",), terminal=True),
    "tqdm_bar": Script("scripts/bars.py", ("TQDMProgressBar",), terminal=True),
    "loaders": Script("scripts/loaders.py"),
    "fresh_data": Script("scripts/fresh_data.py", ("2", "0")),
    "fresh_data_no_sanity": Script("scripts/fresh_data.py", ("0", "0")),
    "fresh_data_reloaded": Script("scripts/fresh_data.py", ("2", "1")),
    "groups": Script("scripts/groups.py"),
    "fits": Script("scripts/fits.py"),
    "tuning": Script("scripts/tuning.py"),
}

# What the default run takes, and the rank that is killed there; the marker `combinations` takes all of it.
SAMPLE = {"hydra": 0, "groups": 1, "lstm": 0}
LIKE_DDP = ("hydra", "metrics")  # those that are compared with DDP
