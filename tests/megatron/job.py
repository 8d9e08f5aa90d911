"""The training of a small GPT of megatron-core, with everything that model parallelism adds and can go out of step."""

import json
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_replica import ReplicaZeroStrategy
from lightning_replica._compat import megatron
from lightning_replica.callbacks import DyingGaspCheckpoint
from lightning_replica.megatron import DynamicGradScaler
from lightning_replica.megatron.megatron_strategy import MegatronReplicaStrategy
from lightning_replica.megatron.sizes import ParallelSizes
from tests.support import job
from tests.support.trainers import state_of, strategy_of

LENGTH, WORDS, EXPERTS = 8, 32, 4
# The gradient of the keys' bias is rounding errors and nothing else. With a small epsilon, Adam makes steps of them.
EPSILON = 1e-3


@dataclass
class Case(job.Case):
    """What to train and what goes wrong."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    experts_tensor: int | None = None
    virtual: int | None = None
    sequence: bool = False
    heads: int = 2
    micro: int | None = 2
    reruns: bool = False  # the module uses megatron-core's RerunStateMachine
    uneven: bool = False  # a last stage with fewer layers, and sequences of two lengths
    bare: bool = False  # under ReplicaZeroStrategy, without a schedule of megatron-core's
    scaled: bool = False  # fp16, with a loss scale that soon grows too large
    experts: bool = False  # even if one rank has all of them
    biased: bool = False  # routers keep a bias for each expert, which follows the tokens of all ranks
    gated: bool = False  # SwiGLU, which has two tensors in one
    validate: bool = False  # and nothing else
    head: bool = False  # a layer of megatron-core's outside of its model, on the last stage
    plain: bool = False  # no dropout, scheduler, validation; the values of weights are told
    hooks: bool = False  # notes calls of hooks; as these may look at gradients, they are made whole
    workers: int = 0
    worker_dies: int | None = None  # the rank whose DataLoader worker is killed once


class Samples(TensorDataset):
    """Tokens, and in the second batch of one rank, once, a death of the worker that loads it."""

    def __init__(self, tokens: Tensor, case: Case, out: Path) -> None:
        super().__init__(tokens)
        self._is_fatal = case.worker_dies == int(os.environ["LOCAL_RANK"])
        self._marker, self._loaded = out / "worker", 0

    def __getitem__(self, index: int) -> Any:
        self._loaded += 1
        if self._is_fatal and self._loaded == 6 and not self._marker.exists():
            self._marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Calls(Callback):
    """The hooks of a step, in the order in which Lightning calls them."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        return {"names": list(self.names)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.names = list(state["names"])

    def on_before_zero_grad(self, *_: Any) -> None:
        self.names.append("zero")

    def on_before_backward(self, *_: Any) -> None:
        self.names.append("backward")

    def on_after_backward(self, *_: Any) -> None:
        self.names.append("after backward")

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.names.append("step")


class GPT(L.LightningModule):
    """Tied embeddings, and dropout inside and outside of tensor parallel regions."""

    def __init__(self, case: Case, faults: job.Faults) -> None:
        super().__init__()
        self._case, self._faults = case, [faults]  # in a list: not a child
        self.norms: list[float | None] = []
        self.zeros: list[float | None] = []
        self.scales: list[float] = []

    @property
    def _megatron(self) -> MegatronReplicaStrategy:
        assert isinstance(self.trainer.strategy, MegatronReplicaStrategy)
        return self.trainer.strategy

    @property
    def _rerun(self) -> Any:
        return _rerun_machine() if self._case.reruns else None

    def on_train_batch_end(self, *args: Any) -> None:
        strategy = strategy_of(self.trainer)
        self.norms.append(strategy.grad_norm)
        self.zeros.append(strategy.num_zeros_in_grad if isinstance(strategy, MegatronReplicaStrategy) else None)
        scaler = strategy.precision_plugin.enabled_scaler()
        self.scales += [] if scaler is None else [scaler.get_scale()]

    def configure_model(self) -> None:
        from megatron.core import parallel_state
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.transformer.transformer_config import TransformerConfig

        if hasattr(self, "model"):
            return
        if self._case.bare:
            megatron.initialize(sizes_of(self._case).for_groups, 1)
            megatron.seed(7)
        dropout = 0.0 if self._case.plain else 0.1
        config = TransformerConfig(
            num_layers=4 if self._case.virtual else 3 if self._case.uneven else 2,
            num_layers_in_first_pipeline_stage=2 if self._case.uneven else None,
            variable_seq_lengths=self._case.uneven,
            hidden_size=16,
            num_attention_heads=self._case.heads,
            use_cpu_initialization=True,
            pipeline_dtype=torch.float32,
            hidden_dropout=dropout,
            attention_dropout=dropout,
            **{**_experts(self._case), **_gated(self._case)},
            **sizes_of(self._case).for_model,
        )
        chunks = [
            GPTModel(
                config,
                get_gpt_layer_local_spec(num_experts=EXPERTS if _has_experts(self._case) else None),
                vocab_size=WORDS,
                max_sequence_length=LENGTH,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
                share_embeddings_and_output_weights=True,
                vp_stage=stage,
            )
            for stage in ([None] if self._case.virtual is None else range(self._case.virtual))
        ]
        self.model = chunks[0] if self._case.virtual is None else torch.nn.ModuleList(chunks)
        if self._case.head and parallel_state.is_pipeline_last_stage():
            from megatron.core.tensor_parallel import ColumnParallelLinear

            self.head = ColumnParallelLinear(16, 8, config=config, init_method=torch.nn.init.zeros_)

    def forward_step(self, batches: Iterator[Any], model: Any) -> tuple[Tensor, Any]:
        (tokens,) = next(batches)
        if self._case.uneven:
            tokens = tokens[:, : LENGTH // (1 + int(tokens[0, 0]) % 2)]
        length = tokens.shape[1]
        mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
        output = model(tokens, torch.arange(length).repeat(len(tokens), 1), mask, labels=tokens.roll(-1, 1))
        step = self.trainer.global_step if self._trainer is not None else 0
        self._faults[0].reach("forward", step)
        if output.requires_grad:
            output.register_hook(lambda _: self._faults[0].reach("backward", step))
        return output, self._mean

    def _mean(self, losses: Tensor) -> tuple[Tensor, dict[str, Any]]:
        mean = losses.mean()
        if self._rerun is not None:
            self._rerun.is_unexpectedly_large(mean.detach(), threshold=1e9, context="loss", num_samples=1000)
        return mean, {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self._case.bare:
            losses, mean = self.forward_step(iter([batch]), self.model)
            return mean(losses)[0]
        while self._rerun is None or self._rerun.should_run_forward_backward(None):
            loss = self._megatron.forward_backward(self.forward_step, batch)
            if self._rerun is None:
                break
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self._megatron.forward_backward(self.forward_step, batch, forward_only=True))

    def configure_optimizers(self) -> Any:
        if self._case.plain:  # megatron-core decays matrices only
            return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.0, eps=EPSILON)
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)]


def _rerun_machine() -> Any:
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    return get_rerun_state_machine()


def data(case: Case) -> Tensor:
    """Samples for four batches of four on every data parallel rank."""
    return torch.randint(0, WORDS, (16 * case.devices // (case.tensor * case.pipeline), LENGTH))


def sizes_of(case: Case) -> ParallelSizes:
    """How the world is divided."""
    return ParallelSizes(case.tensor, case.pipeline, 1, case.expert, case.experts_tensor, case.virtual, case.sequence)


def _has_experts(case: Case) -> bool:
    return case.experts or case.expert > 1


def _gated(case: Case) -> dict[str, Any]:
    if not case.gated:
        return {}
    return {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "add_bias_linear": False}


def _experts(case: Case) -> dict[str, Any]:
    """What TransformerConfig is told about experts."""
    if case.uneven:  # lengths that vary exclude megatron-core's default, also without experts
        return {"moe_token_dispatcher_type": "alltoall"}
    if not _has_experts(case):
        return {}
    found = {"num_moe_experts": EXPERTS, "moe_token_dispatcher_type": "allgather", "add_bias_linear": False}
    if case.biased:
        found |= {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    return found


def _half() -> MixedPrecision:
    scaler = DynamicGradScaler("cpu", 2.0**18, growth_interval=2, hysteresis=2)
    return MixedPrecision("16-mixed", "cpu", scaler)


def _strategy(case: Case, options: dict[str, Any]) -> ReplicaZeroStrategy:
    common = {**job.strategy_options(case), **options}
    if case.bare:
        return ReplicaZeroStrategy(**common)
    sizes = sizes_of(case).for_model
    return MegatronReplicaStrategy(**sizes, micro_batch_size=case.micro, log_num_zeros_in_grad=case.plain, **common)


def run(case: Case, out: Path, **options: Any) -> None:
    """Trains in one rank and writes down what came of it; ``options`` are the strategy's."""
    warnings.simplefilter("ignore")  # of megatron-core, which knows that its generators are the CPU's here
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    import megatron_cpu

    megatron_cpu.install()
    torch.set_num_threads(1)
    L.seed_everything(7, verbose=False)
    tokens = data(case)
    faults = job.Faults(case, out)
    model = GPT(case, faults)
    calls = Calls()
    trainer = L.Trainer(
        strategy=_strategy(case, options),
        accelerator="cpu",
        devices=case.devices,
        max_epochs=case.epochs,
        accumulate_grad_batches=case.accumulate,
        val_check_interval=2,
        limit_val_batches=0 if case.plain else 1,
        gradient_clip_val=case.clip,
        plugins=[_half()] if case.scaled else None,
        callbacks=[
            faults,
            *([calls] if case.hooks else ()),
            ModelCheckpoint(out / "checkpoints", filename="{step}", every_n_train_steps=2, save_top_k=-1),
            *([DyingGaspCheckpoint(out / "gasp", case.grace_s)] if case.gasp else ()),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    train = DataLoader(Samples(tokens, case, out), 4, shuffle=True, num_workers=case.workers)
    loaders = train, DataLoader(TensorDataset(tokens[:4]), 4)
    if case.validate:
        (found,) = trainer.validate(model, loaders[1], ckpt_path=case.load, verbose=False)
        (out / f"rank{trainer.global_rank}.json").write_text(json.dumps(found))
        return
    trainer.fit(model, *loaders, ckpt_path=case.load or None)
    (out / f"rank{trainer.global_rank}.json").write_text(json.dumps({**_result(trainer, model), "calls": calls.names}))


def _result(trainer: L.Trainer, model: GPT) -> dict[str, Any]:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    state = state_of(strategy_of(trainer))
    trackers = get_cuda_rng_tracker().get_states()
    values = [p.detach().flatten().tolist() for p in model.parameters()] if model._case.plain else []
    return {
        "values": values,
        "norms": model.norms,
        "zeros": model.zeros,
        "scales": model.scales,
        "bias": [values.tolist() for name, values in model.named_buffers() if name.endswith("expert_bias")],
        "weights": job._digest(*model.parameters(), *model.buffers()),
        "main": job._digest(*[buffers.main for buffers in state.buffers]),
        "optimizer": job._digest(*[t for sharded in state.optimizers for _, t in sorted(sharded.state()[0].items())]),
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "random": job._digest(torch.get_rng_state(), *[trackers[name] for name in sorted(trackers)]),
        "rerun": megatron.rerun_state(),
        "progress": [trainer.global_step, trainer.current_epoch, trainer.fit_loop.epoch_loop.total_batch_idx],
    }
