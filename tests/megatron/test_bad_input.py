"""What users get wrong about models of megatron-core, told before ranks wait for each other."""

import importlib.metadata
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from lightning_replica import MegatronReplicaStrategy
from lightning_replica._compat import megatron
from lightning_replica.errors import ConfigurationError
from lightning_replica.megatron.division import check_chunks
from lightning_replica.megatron.sizes import ParallelSizes
from tests.megatron import job
from tests.megatron.test_faults import make
from tests.support import world
from tests.support.ranks import run_ranks

SIZES = ParallelSizes(tensor_model_parallel_size=2)


def chunk(**options: Any) -> MegatronModule:
    given = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "use_cpu_initialization": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own defaults
        return MegatronModule(TransformerConfig(**given, **{**SIZES.for_model, **options}))


def wrapped() -> Any:
    return _BaseDataParallel(chunk().config, chunk())


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (list, "GPT has no model of megatron-core. Build it in `configure_model`"),
        (lambda: [chunk(), chunk()], "has 2 models of megatron-core on this rank, but virtual_pipeline_"),
        (lambda: [wrapped()], "_BaseDataParallel of megatron-core averages gradients, which the strategy does"),
        (lambda: [chunk(tensor_model_parallel_size=1)], "has tensor_model_parallel_size=1, but the strategy has 2"),
        (lambda: [chunk(sequence_parallel=True)], "has sequence_parallel=True, but the strategy has False"),
        (lambda: [chunk(no_sync_func=print)], "sets no_sync_func. Leave it out: gradients are reduced after"),
        (lambda: [chunk(param_sync_func=print)], "sets param_sync_func. Leave it out: parameters are gathered"),
        (lambda: [chunk(finalize_model_grads_func=print)], "`forward_backward` calls megatron-core's"),
    ],
)
def test_models_that_do_not_fit(made: Callable[[], list[Any]], said: str) -> None:
    check_chunks([chunk()], SIZES, "GPT")
    with pytest.raises(ConfigurationError, match=said):
        check_chunks(made(), SIZES, "GPT")


@pytest.mark.parametrize("found", ["0.13.1", "0.17.0"])
def test_another_release(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_replica._compat.megatron.version", lambda _: found)
    with pytest.raises(ConfigurationError, match=f"megatron-core {found} is installed"):
        MegatronReplicaStrategy()


def test_no_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigurationError, match="which is not installed"):
        MegatronReplicaStrategy()


def test_the_release_that_ci_installs_is_known() -> None:
    assert importlib.metadata.version("megatron-core").startswith("0.16.")


def groups_of_others(rank: int, store: Any) -> list[str]:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    warnings.simplefilter("ignore")  # of parallel_state
    megatron.initialize(ParallelSizes(tensor_model_parallel_size=2).for_groups, 1)
    ParallelSizes(tensor_model_parallel_size=2).check_groups(megatron.sizes())
    try:
        ParallelSizes(pipeline_model_parallel_size=2).check_groups(megatron.sizes())
    except ConfigurationError as error:
        return [str(error)]
    finally:
        dist.destroy_process_group()
    return []


def test_groups_that_exist_with_other_sizes() -> None:
    ((said,), other) = run_ranks(2, groups_of_others)
    assert other == [said]
    assert "with tensor_model_parallel_size=2, pipeline_model_parallel_size=1, expert_tensor" in said
    assert "but the strategy has tensor_model_parallel_size=1, pipeline_model_parallel_size=2, expert" in said


def test_heads_that_tensor_ranks_do_not_divide(tmp_path: Path) -> None:
    """megatron-core says so, on every rank; the run ends, and nobody waits."""
    outcome = world.run(replace(make("tp"), heads=3), tmp_path, target=job.run)
    assert outcome.code == 1
    assert "num_attention_heads (3) must be a multiple of tensor_model_parallel_size (2)" in outcome.logs
