"""What a rank computes with: the files of the script, the packages that it has imported, and the hardware."""

import ast
import hashlib
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch

from lightning_replica._compat.torch import float32_precision
from lightning_replica.core.user_code import is_installed, is_users

NAMED: Final = "file "
"""How the names of sources begin that may be none: files on the command line, to which the script may also write."""

_CONFIGS: Final = frozenset((".cfg", ".conf", ".ini", ".json", ".toml", ".yaml", ".yml"))
_MAX_BYTES: Final = 2**20  # of a configuration file
_VARIABLES: Final = (  # choose kernels whose last bits differ
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_MAX_CPU_ISA",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)


def sources() -> dict[str, str]:
    """Return what this process runs, each with its version or a digest.

    That is the script, the modules of the user's that were imported, the configuration files on the command line and
    those that Hydra has read, and the packages that were imported. Ranks may import different modules: only what two of
    them have in common can be compared.
    """
    found: dict[str, str] = {}
    for name, module in sorted(sys.modules.items()):
        names = vars(module) if hasattr(module, "__dict__") else {}
        file = names.get("__file__")
        if not isinstance(file, str) or name == "__mp_main__":
            continue
        if is_installed(file):
            version = names.get("__version__")
            if "." not in name and isinstance(version, str):
                found[f"package {name}"] = version
        elif file.endswith(".py") and is_users(file) and not _is_made_by_a_package(name):
            found.update(_digest_of("script" if name == "__main__" else f"module {name}", Path(file)))
    for path in _named_on_the_command_line():
        found.update(_digest_of(f"{NAMED}{path}", path))
    for name, path in _of_hydra():
        found.update(_digest_of(f"configuration {name}", path))
    return found


def hardware(kind: str, is_host: bool) -> dict[str, str]:
    """Return what last bits depend on besides the sources.

    Args:
        kind: ``torch.device.type`` of the rank's tensors.
        is_host: Whether these lie in the host's memory.
    """
    found = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    if is_host:
        found["processor"] = f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}"
    else:
        name_of = getattr(torch.get_device_module(kind), "get_device_name", None)
        found["device"] = kind if name_of is None else str(name_of())
    with suppress(RuntimeError):  # the script sets it by torch's newer interface, which this one refuses to describe
        found["precision of float32 products"] = float32_precision()
    return found


def _is_made_by_a_package(name: str) -> bool:
    """True if the module belongs to an installed package, which has made its file. torch.compile makes such files."""
    top = sys.modules.get(name.partition(".")[0])
    file = getattr(top, "__file__", None)
    return isinstance(file, str) and is_installed(file)


def _digest_of(name: str, path: Path) -> dict[str, str]:
    digest = digest_of(path)
    return {name: digest} if digest else {}


def digest_of(path: Path) -> str:
    """Return a digest of a file; empty if it cannot be read, as it was removed meanwhile or is in an archive."""
    try:
        content = path.read_bytes()
    except OSError:
        return ""
    return hashlib.sha256(_meaning(content) if path.suffix == ".py" else content).hexdigest()[:16]


def _meaning(source: bytes) -> bytes:
    """Return what a source says apart from comments and layout: who edits only these changes no training."""
    try:
        return ast.dump(ast.parse(source)).encode()
    except (SyntaxError, ValueError, RecursionError):  # it is being edited
        return source


def _named_on_the_command_line() -> Iterator[Path]:
    for argument in sys.argv[1:]:
        path = Path(argument.rpartition("=")[2])
        with suppress(OSError, ValueError):  # it is no name of a file, or of one that may not be looked at
            if path.suffix in _CONFIGS and path.is_file() and path.stat().st_size <= _MAX_BYTES:
                yield path


def directory_of_this_start() -> Path | None:
    """Return the directory that Hydra has made for this start of the script; None if the next start has the same.

    Hydra's own default has the time in its name.
    """
    config = _hydra()
    if config is None:
        return None
    chosen = config.sweep if config.mode is not None and config.mode.name == "MULTIRUN" else config.run
    text = sys.modules["omegaconf"].OmegaConf.to_container(chosen, resolve=False)["dir"]
    made = config.runtime.get("output_dir")  # None if the configuration was composed without `hydra.main`
    return Path(made) if made and "${now:" in str(text) else None


def _hydra() -> Any:
    hydra = sys.modules.get("hydra.core.hydra_config")
    return hydra.HydraConfig.get() if hydra is not None and hydra.HydraConfig.initialized() else None


def _of_hydra() -> Iterator[tuple[str, Path]]:
    """Yield the files of which Hydra has composed this process's configuration, with their names in its folder."""
    config = _hydra()
    if config is None:
        return
    chosen = [f"{group.partition('@')[0]}/{name}" for group, name in config.runtime.choices.items()]
    for source in config.runtime.config_sources:
        if source.schema == "file":
            for name in (config.job.config_name, *chosen):
                yield f"{name}.yaml", Path(source.path, f"{name}.yaml")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
