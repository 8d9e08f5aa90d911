"""torch's settings for the whole process, which user code may change in training, as TF32 from some step on.

What is computed depends on them. A rank that goes back sets them back; a replacement gets them from a peer. The number
of threads may differ from rank to rank; `trainer.session` sees to it.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import torch
from torch.backends import cuda, cudnn

from lightning_replica._compat.torch import float32_precision

_Pair = tuple[Callable[[], Any], Callable[[Any], object]]


def _of_cudnn(name: str) -> _Pair:
    return lambda: getattr(cudnn, name), lambda value: setattr(cudnn, name, value)


_PRECISION: Final = "precision of float32 products"
_NEWER: Final = "precisions of float32"
_SETTINGS: Final[dict[str, _Pair]] = {
    "default dtype": (
        lambda: str(torch.get_default_dtype())[6:],
        lambda name: torch.set_default_dtype(getattr(torch, name)),
    ),
    _PRECISION: (float32_precision, torch.set_float32_matmul_precision),
    "deterministic algorithms": (
        lambda: [torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()],
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    "anomaly detection": (
        lambda: [torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()],
        lambda value: torch.autograd.set_detect_anomaly(*value),
    ),
    **{f"cudnn.{name}": _of_cudnn(name) for name in ("enabled", "benchmark", "deterministic", "allow_tf32")},
    "sums in bfloat16": (
        lambda: cuda.matmul.allow_bf16_reduced_precision_reduction,
        lambda value: setattr(cuda.matmul, "allow_bf16_reduced_precision_reduction", value),
    ),
    "attention by cuDNN": (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    "flash attention": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    "memory-efficient attention": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    "attention by matrix products": (cuda.math_sdp_enabled, cuda.enable_math_sdp),
}


def take() -> dict[str, Any]:
    """Return torch's settings, as plain data."""
    found = {}
    for name, (read, _) in _SETTINGS.items():
        # The script uses torch's newer interface for the precision, which this one refuses to describe.
        with suppress(RuntimeError):
            found[name] = read()
    if _PRECISION not in found:
        found[_NEWER] = [owner.fp32_precision for owner in _owners()]
    return found


def _owners() -> list[Any]:
    """Return what has a precision of its own in torch's newer interface."""
    return [cuda.matmul, cudnn.conv, cudnn.rnn]  # type: ignore[attr-defined]


def put_back(settings: dict[str, Any]) -> None:
    """Set what is otherwise than `take` has returned."""
    now = take()
    if _NEWER in settings:
        for owner, value in zip(_owners(), settings[_NEWER], strict=True):
            if owner.fp32_precision != value:
                owner.fp32_precision = value
    for name, value in settings.items():
        if name in _SETTINGS and name in now and now[name] != value:
            with suppress(RuntimeError):  # torch's own tests forbid to set some of them
                _SETTINGS[name][1](value)
