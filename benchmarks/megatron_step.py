"""Step time of `MegatronReplicaStrategy` beside megatron-core's own DDP and distributed optimizer, in turns.

    python benchmarks/megatron_step.py --tensor 2              # TP 2 x DP 2
    python benchmarks/megatron_step.py --pipeline 2            # PP 2 x DP 2
    python benchmarks/megatron_step.py --tensor 2 --sockets    # without shared memory

Both train the same model of megatron-core, under its own schedule, with AdamW and a clipped norm. Each rank runs both, in
threads that make their steps in turns (see `alternating`). Needs megatron-core and einops. It runs on CPUs, with the
stand-ins of examples/megatron_cpu.py for what megatron-core asks of CUDA.
"""

import argparse
import os
import statistics
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "examples")]
import lightning as L
import megatron_cpu
from alternating import WARM_UP, Baton, Turn, enter
from common import QUIET, spread, write
from torch.utils.data import DataLoader, TensorDataset

from lightning_replica import MegatronReplicaStrategy
from lightning_replica.core.options import RecoveryOptions
from lightning_replica.launch.environment import RankEnvironment
from lightning_replica.launch.node import start_script
from lightning_replica.launch.supervisor import Supervisor

WORDS, LENGTH, WIDTH, LAYERS, BATCH, MICRO = 4096, 64, 256, 6, 8, 2
OURS, FUSED, THEIRS = (
    "replica_zero_megatron",
    "replica_zero_megatron, AdamW(fused=True)",
    "megatron-core's DDP + distributed optimizer",
)


def build(sizes: dict[str, Any]) -> Any:
    """Return this rank's part of the model."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=8,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **sizes,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=WORDS,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
    )


def forward_step(batches: Iterator[Any], model: Any) -> tuple[torch.Tensor, Any]:
    (tokens,) = next(batches)
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)
    output = model(tokens, torch.arange(LENGTH).expand_as(tokens), mask, labels=tokens)
    return output, lambda losses: (losses.mean(), {})


class Module(L.LightningModule):
    """The model under the strategy."""

    def __init__(self, turn: Turn, fused: bool) -> None:
        super().__init__()
        self.turn, self.fused = (turn,), fused

    def configure_model(self) -> None:
        self.model = build(self.trainer.strategy.model_parallel_config)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        self.turn[0].step(self.trainer)
        return self.trainer.strategy.forward_backward(forward_step, batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=self.fused)


def ours(turn: Turn, sizes: tuple[int, int], ranks: int, steps: int, sockets: bool, fused: bool) -> None:
    """Train under the strategy."""
    turn.baton.take(turn.number)
    trainer = L.Trainer(
        strategy=MegatronReplicaStrategy(*sizes, micro_batch_size=MICRO, shared_memory=not sockets),
        accelerator="cpu",
        devices=ranks,
        max_steps=steps + WARM_UP + 1,
        gradient_clip_val=1.0,
        **QUIET,
    )
    tokens = torch.randint(0, WORDS, (BATCH * ranks * (steps + WARM_UP + 2), LENGTH))
    trainer.fit(Module(turn, fused), DataLoader(TensorDataset(tokens), batch_size=BATCH))
    turn.baton.leave(turn.number)


def theirs(turn: Turn, sizes: tuple[int, int], steps: int) -> None:
    """Train with megatron-core alone, in its process groups, which the strategy has made."""
    turn.baton.take(turn.number)
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    tensor, pipeline = sizes
    model = build({"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline})
    chunk = DistributedDataParallel(model.config, DistributedDataParallelConfig(use_distributed_optimizer=True), model)
    chunk.broadcast_params()
    settings = OptimizerConfig(optimizer="adam", lr=1e-4, clip_grad=1.0, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(settings, [chunk], use_gloo_process_groups=False)
    run = get_forward_backward_func()
    progress = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cpu")), global_step=0)
    for step in range(steps + WARM_UP + 1):
        progress.global_step = step
        turn.step(progress)
        micro_batches = [(part,) for part in torch.randint(0, WORDS, (BATCH, LENGTH)).split(MICRO)]
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        run(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches),
            model=[chunk],
            num_microbatches=len(micro_batches),
            seq_length=LENGTH,
            micro_batch_size=MICRO,
            forward_only=False,
        )
        finalize_model_grads([chunk])
        optimizer.step()
    turn.baton.leave(turn.number)


def report(sizes: tuple[int, int], ranks: int, sockets: bool, turns: dict[str, Turn]) -> None:
    """Write the table."""
    tensor, pipeline = sizes
    base, rows = turns[THEIRS].seconds, []
    for name in (THEIRS, OURS, FUSED):
        turn = turns[name]
        ratios = [one / other for one, other in zip(turn.seconds, base, strict=False)]
        sent = statistics.median(turn.bytes) / ranks / 2**20
        rows.append([name, spread([1e3 * s for s in turn.seconds]), spread(ratios), f"{sent:.1f}"])
    notes = f"""
{LAYERS} layers of {WIDTH}, {WORDS} words, {LENGTH} tokens; {BATCH} samples a data parallel rank and step, {MICRO} in a micro-batch;
fp32, gloo, TP {tensor} x PP {pipeline} x DP {ranks // tensor // pipeline}, 1 thread a rank. {len(base)} rounds; median and middle half. Ratios are
those of steps of the same round. MiB are sent per rank and step through sockets, including what tensor ranks and stages
send each other. {"Without" if sockets else "With"} shared memory for what data parallel ranks send. With R = 2 and DP = 2, each rank
updates all parameters of its part, where megatron-core's updates half of them. megatron-core's optimizer has torch's AdamW as it comes;
on a GPU it would have a fused one.
"""
    name = f"megatron_step_tp{tensor}_pp{pipeline}{'_sockets' if sockets else ''}"
    raw = {name: {"seconds": turn.seconds, "bytes": turn.bytes} for name, turn in turns.items()}
    write(name, f"Step time, TP {tensor} x PP {pipeline}", ["", "ms", "ratio", "MiB sent"], rows, notes, raw)


def alternate(sizes: tuple[int, int], ranks: int, steps: int, sockets: bool) -> dict[str, Turn]:
    """Be a rank in which both train. The strategy comes first: it makes megatron-core's process groups."""
    baton = Baton(3)
    turns = {name: Turn(number, baton, "lo") for number, name in enumerate((OURS, FUSED, THEIRS))}
    work = [
        lambda: ours(turns[OURS], sizes, ranks, steps, sockets, fused=False),
        lambda: ours(turns[FUSED], sizes, ranks, steps, sockets, fused=True),
        lambda: theirs(turns[THEIRS], sizes, steps),
    ]
    threads = [threading.Thread(target=enter, args=(each,)) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return turns


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--pipeline", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--sockets", action="store_true", help="run the strategy with shared_memory=False")
    args = parser.parse_args()
    ranks = 2 * args.tensor * args.pipeline
    if RankEnvironment.current() is None:
        command = [sys.executable, *sys.argv]
        options = RecoveryOptions(recovery=False)
        return Supervisor(start_script(lambda _: (command, None)), ranks, options, print).run()
    megatron_cpu.install()
    megatron_cpu.pass_for_cuda()
    torch.set_num_threads(1)
    sizes = args.tensor, args.pipeline
    turns = alternate(sizes, ranks, args.steps, args.sockets)
    if os.environ["LOCAL_RANK"] == "0":
        report(sizes, ranks, args.sockets, turns)
    return 0


if __name__ == "__main__":
    sys.exit(main())
