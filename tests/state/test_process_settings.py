"""Settings of torch and NumPy for the whole process: what user code changes in training is set back."""

import json
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch.backends import cuda, cudnn, mha, mkldnn, opt_einsum

from lightning_replica.state import process_settings

CHANGES: dict[str, Callable[[], object]] = {
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "precision of float32 products": lambda: torch.set_float32_matmul_precision("high"),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "cudnn.benchmark": lambda: setattr(cudnn, "benchmark", True),
    "cudnn.deterministic": lambda: setattr(cudnn, "deterministic", True),
    "cudnn.allow_tf32": lambda: setattr(cudnn, "allow_tf32", False),
    "sums in bfloat16": lambda: setattr(cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    "sums in float16": lambda: setattr(cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
    "default device": lambda: torch.set_default_device("meta"),
    "denormal numbers are 0": lambda: torch.set_flush_denormal(True),
    "errors of NumPy": lambda: np.seterr(over="raise"),
    "autocast": lambda: torch.set_autocast_dtype("cpu", torch.float16),
    "fast path of attention": lambda: mha.set_fastpath_enabled(False),
    "oneDNN": lambda: setattr(mkldnn, "enabled", False),
    "attention by cuDNN": lambda: cuda.enable_cudnn_sdp(False),
    "cudnn.enabled": lambda: setattr(cudnn, "enabled", False),
    "flash attention": lambda: cuda.enable_flash_sdp(False),
    "memory-efficient attention": lambda: cuda.enable_mem_efficient_sdp(False),
    "attention by matrix products": lambda: cuda.enable_math_sdp(False),
}
if opt_einsum.is_available():
    CHANGES["opt_einsum.enabled"] = lambda: setattr(opt_einsum, "enabled", False)
    CHANGES["opt_einsum.strategy"] = lambda: setattr(opt_einsum, "strategy", "optimal")


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # torch.testing, which other tests import, forbids to set some.
    monkeypatch.setitem(torch.backends.flags_frozen.__globals__, "flags_frozen", lambda: False)
    before = process_settings.take()
    yield
    process_settings.put_back(before)


def test_all_are_tried() -> None:
    assert CHANGES.keys() == process_settings.take().keys()


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_is_set_back(name: str) -> None:
    before = json.loads(json.dumps(process_settings.take()))
    CHANGES[name]()
    changed = process_settings.take()
    assert [each for each in before if changed[each] != before[each]] == [name]
    process_settings.put_back(before)
    assert process_settings.take() == before
    process_settings.put_back(changed)
    assert process_settings.take() == changed


def test_a_setting_that_this_torch_does_not_know_is_left_alone() -> None:
    process_settings.put_back({"another": 1})
