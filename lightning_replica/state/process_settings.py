"""Settings of torch and NumPy for the whole process, which user code may change in training, as TF32 from some step on.

What is computed depends on them. A rank that goes back sets them back; a replacement has those of its predecessor.
The number of threads may differ from rank to rank; `trainer.session` sees to it.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import numpy as np
import torch
from torch.backends import cuda, cudnn, mha, mkldnn, opt_einsum

from lightning_replica._compat.torch import float32_precision, unset_default_device
from lightning_replica.devices.host import HOST

_Pair = tuple[Callable[[], Any], Callable[[Any], object]]


def _of(owner: Any, name: str) -> _Pair:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _flushes_denormals() -> bool:
    """Return whether tiny results become 0, which torch does not tell: the processor does it to Python's, too."""
    return _TINY * 0.5 == 0.0


def _default_device() -> str:
    """Return the kind of the default device. Its index is left out: each rank has one of its own."""
    try:
        return torch.get_default_device().type
    except AttributeError:  # torch 2.9, after the user's `torch.set_default_device(None)`
        return HOST.type


def _kinds_of_devices() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    return (HOST.type,) if accelerator is None else (HOST.type, accelerator.type)


def _autocast() -> list[Any]:
    kinds = _kinds_of_devices()
    found = [[torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind))[6:]] for kind in kinds]
    return [*found, torch.is_autocast_cache_enabled()]


def _set_autocast(settings: list[Any]) -> None:
    *of_kinds, cache = settings
    for kind, (enabled, dtype) in zip(_kinds_of_devices(), of_kinds, strict=False):
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, getattr(torch, dtype))
    torch.set_autocast_cache_enabled(cache)


def _set_default_device(kind: str) -> None:
    unset_default_device() if kind == HOST.type else torch.set_default_device(kind)


_PRECISION: Final = "precision of float32 products"
_TINY: Final = sys.float_info.min
_OF_EINSUM: Final = ("enabled", "strategy") if opt_einsum.is_available() else ()
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
    "autocast": (_autocast, _set_autocast),
    "default device": (_default_device, _set_default_device),
    "denormal numbers are 0": (_flushes_denormals, torch.set_flush_denormal),
    "errors of NumPy": (np.geterr, lambda value: np.seterr(**value)),
    "oneDNN": _of(mkldnn, "enabled"),
    **{f"opt_einsum.{name}": _of(opt_einsum, name) for name in _OF_EINSUM},
    **{f"cudnn.{name}": _of(cudnn, name) for name in ("enabled", "benchmark", "deterministic", "allow_tf32")},
    "sums in bfloat16": _of(cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    "sums in float16": _of(cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    "attention by cuDNN": (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    "flash attention": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    "memory-efficient attention": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    "attention by matrix products": (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    "fast path of attention": (mha.get_fastpath_enabled, mha.set_fastpath_enabled),
}


def take() -> dict[str, Any]:
    """Return the settings, as plain data."""
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
            # torch's own tests forbid to set some of them; opt_einsum has no strategy while it is not enabled.
            with suppress(RuntimeError, ValueError):
                _SETTINGS[name][1](value)
