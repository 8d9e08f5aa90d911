"""What megatron-core asks of CUDA although it could do without, answered by the CPU.

For trying things out only: megatron-core 0.16 has no support for CPUs. Call `install` before anything else of it.
"""

import contextlib
import logging
import warnings
from typing import Any

import torch


class Nothing:
    """Stands for CUDA's streams and events."""

    def __init__(self, *args: Any, **options: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, *args: Any) -> "Nothing":
        return self


def install() -> None:
    """Let megatron-core run on a CPU, in this process."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.Stream = cuda.Event = Nothing
    cuda.current_stream = lambda *args, **options: Nothing()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.synchronize = lambda *args: None
    cuda.manual_seed, cuda.initial_seed = torch.manual_seed, torch.initial_seed
    cuda.get_rng_state = lambda *args, **options: torch.get_rng_state()
    torch.Tensor.cuda = lambda self, *args, **options: self  # type: ignore[method-assign, assignment]
    for name in ("tensor", "zeros", "empty", "ones", "arange", "full"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of megatron-core, about what is not installed
        from megatron.core.tensor_parallel import random
        from megatron.core.transformer import torch_norm
        from megatron.core.transformer.moe import moe_utils
    logging.getLogger(random.__name__).setLevel(logging.ERROR)  # its generator and the CPU's are the same
    random._get_cuda_rng_state = lambda *args, **options: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **options: torch.set_rng_state(state)
    torch_norm.WrappedTorchNorm.__new__ = _norm
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _norm(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **options: Any) -> torch.nn.Module:
    """Make the norm that Apex or TransformerEngine would: it marks what sequence parallelism has to add up."""
    kind = torch.nn.LayerNorm if config.normalization == "LayerNorm" else torch.nn.RMSNorm
    norm = kind(hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


def pass_for_cuda() -> None:
    """Let megatron-core's distributed optimizer take the CPU's tensors for those of a GPU, the only ones it knows."""
    real = torch.Tensor.type

    def type_of(self: torch.Tensor, *args: Any, **options: Any) -> Any:
        return real(self, *args, **options) if args or options else real(self).replace("torch.", "torch.cuda.")

    torch.Tensor.type = type_of  # type: ignore[method-assign, assignment]


def _on_cpu(real: Any) -> Any:
    def make(*args: Any, **options: Any) -> Any:
        elsewhere = str(options.get("device", "")).startswith("cuda")
        return real(*args, **(options | {"device": "cpu"} if elsewhere else options))

    return make
