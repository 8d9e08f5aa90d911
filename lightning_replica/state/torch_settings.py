"""torch's settings for the whole process, which user code may change in training, as TF32 from some step on.

What is computed depends on them. A rank that goes back sets them back; a replacement gets them from a peer. The number
of threads may differ from rank to rank; `trainer.session` sees to it.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import torch
from torch.backends import cuda, cudnn

_Pair = tuple[Callable[[], Any], Callable[[Any], object]]


def _of_cudnn(name: str) -> _Pair:
    return lambda: getattr(cudnn, name), lambda value: setattr(cudnn, name, value)


_SETTINGS: Final[dict[str, _Pair]] = {
    "default dtype": (
        lambda: str(torch.get_default_dtype())[6:],
        lambda name: torch.set_default_dtype(getattr(torch, name)),
    ),
    "precision of float32 products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "deterministic algorithms": (
        lambda: [torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()],
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    "anomaly detection": (
        lambda: [torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()],
        lambda value: torch.autograd.set_detect_anomaly(*value),
    ),
    **{f"cudnn.{name}": _of_cudnn(name) for name in ("enabled", "benchmark", "deterministic")},
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
    return found


def put_back(settings: dict[str, Any]) -> None:
    """Set what is otherwise than `take` has returned."""
    now = take()
    for name, value in settings.items():
        if name in _SETTINGS and name in now and now[name] != value:
            _SETTINGS[name][1](value)
