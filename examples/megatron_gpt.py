"""A GPT of megatron-core on eight CPU ranks: two tensor ranks x two stages x two data parallel ranks.

    pip install lightning-replica[megatron]
    python examples/megatron_gpt.py                     # train
    python examples/megatron_gpt.py --kill 1 6          # a rank of each stage kills itself after 5 steps

megatron-core has no support for CPUs; stand-ins for what it asks of CUDA come from megatron_cpu.py.
"""

import argparse
import hashlib
import json
import logging
import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import megatron_cpu
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_replica import MegatronReplicaStrategy

logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)  # no tips, no GPU report
warnings.filterwarnings("ignore")  # of megatron-core with torch 2.13, and of Lightning's about workers
megatron_cpu.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

LENGTH, WORDS = 16, 64


class GPT(L.LightningModule):
    """Two layers with tied embeddings and dropout."""

    def configure_model(self) -> None:
        config = TransformerConfig(
            num_layers=2,
            hidden_size=64,
            num_attention_heads=4,
            use_cpu_initialization=True,
            pipeline_dtype=torch.float32,
            **self.trainer.strategy.model_parallel_config,
        )
        self.model = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=WORDS,
            max_sequence_length=LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=True,
        )

    def forward_step(self, batches: Iterator[Any], model: GPTModel) -> tuple[Tensor, Any]:
        tokens, labels = next(batches)
        mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)
        output = model(tokens, torch.arange(LENGTH).expand_as(tokens), mask, labels=labels)
        return output, lambda losses: (losses.mean(), {})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.trainer.strategy.forward_backward(self.forward_step, batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Say(Callback):
    """Prints the loss on rank 0."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.is_global_zero and trainer.global_step % 5 == 0:
            print(f"step {trainer.global_step:4d}  loss {trainer.callback_metrics['loss']:.3f}", flush=True)


class Kill(Callback):
    """Ends ranks as broken machines would: SIGKILL, with no clean-up and no last message."""

    def __init__(self, ranks: list[int], step: int) -> None:
        self.ranks, self.step = ranks, step

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        first_life = os.environ.get("LIGHTNING_REPLICA_GENERATION") == "0"
        if trainer.global_rank in self.ranks and trainer.global_step == self.step and first_life:
            print(f"rank {trainer.global_rank} kills itself in step {self.step}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor", type=int, default=2, help="tensor parallel ranks")
    parser.add_argument("--stages", type=int, default=2, help="pipeline stages")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kill", type=int, nargs="*", default=[], help="ranks that kill themselves")
    parser.add_argument("--at", type=int, default=5, help="step in which they do")
    parser.add_argument("--result", type=Path, help="folder for the SHA-256 of the final weights of each rank")
    options = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(1, verbose=False)
    start = torch.randint(0, WORDS, (512, 1))
    text = (start + 3 * torch.arange(LENGTH + 1)) % WORDS  # every third word: there is something to learn
    trainer = L.Trainer(
        strategy=MegatronReplicaStrategy(options.tensor, options.stages, micro_batch_size=4),
        accelerator="cpu",
        devices=2 * options.tensor * options.stages,
        max_steps=options.steps,
        gradient_clip_val=1.0,
        callbacks=[Say(), Kill(options.kill, options.at)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if trainer.is_global_zero:
        print("megatron-core runs on CPUs here, with stand-ins for what it asks of CUDA (megatron_cpu.py)", flush=True)
    model = GPT()
    trainer.fit(model, DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), batch_size=8, shuffle=True))
    if options.result:
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
        options.result.mkdir(exist_ok=True)
        (options.result / f"{trainer.global_rank}.json").write_text(json.dumps(digest))


if __name__ == "__main__":
    main()
