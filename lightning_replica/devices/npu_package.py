"""The installed torch_npu: its versions, its import, and the reason if it cannot be used.

The package imports torch_npu only when a caller asks for an NPU. torch may have imported it before: ``import torch``
imports it through an entry point of torch_npu, unless ``TORCH_DEVICE_BACKEND_AUTOLOAD=0``.
"""

import importlib
import importlib.metadata
import importlib.util
import os
from typing import Any

import torch
from packaging.requirements import Requirement

from lightning_replica.errors import ConfigurationError

NAME = "torch_npu"
EXTRA = "lightning-replica[npu]"
VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"


def is_installed() -> bool:
    """Return whether torch_npu is installed, which does not mean that it can be used."""
    return importlib.util.find_spec(NAME) is not None


def version() -> str:
    """Return the version of torch_npu, without importing it; empty if it is not known."""
    try:
        return importlib.metadata.version(NAME)
    except importlib.metadata.PackageNotFoundError:
        return ""


def mismatch() -> str:
    """Return a message if torch_npu is made for another version of torch; empty if the two versions match.

    Every torch_npu is made for one version of torch: all numbers of the version but the last must be the same.
    """
    wanted = _wanted_torch()
    if wanted is None or wanted.specifier.contains(torch.__version__, prereleases=True):
        return ""
    return f"torch_npu {version()} is made for {wanted}, but torch is {torch.__version__}"


def load() -> Any:
    """Import torch_npu and return it.

    Raises:
        ConfigurationError: If it is missing, made for another version of torch, or cannot be imported.
    """
    ours = torch.__version__.split("+")[0]
    if not is_installed():
        raise ConfigurationError(
            "An NPU needs torch_npu, which is not installed. On a machine with Ascend's driver and CANN:"
            f' `pip install "{EXTRA}" torch=={ours}`.'
        )
    if reason := mismatch():
        minor = ".".join(ours.split(".")[:2])
        raise ConfigurationError(
            f"{reason}. Install two that match: `pip install torch_npu=={minor}.*`, or `{_wanted_torch()}`."
        )
    try:
        return importlib.import_module(NAME)
    except Exception as error:  # of any class: it depends on which part of CANN is missing
        raise ConfigurationError(
            f"torch_npu {version()} cannot be imported: {type(error).__name__}: {error}. Is CANN installed, and its"
            " `set_env.sh` sourced?"
        ) from error


def load_with_devices() -> Any:
    """Import torch_npu like `load`, and check that there is an NPU.

    Raises:
        ConfigurationError: If there is no NPU, or if `load` raises it.
    """
    torch_npu = load()
    if torch_npu.npu.is_available():
        return torch_npu
    visible = f"; {VISIBLE}={os.environ[VISIBLE]!r} selects among them" if VISIBLE in os.environ else ""
    raise ConfigurationError(
        f"torch_npu {version()} finds no NPU. `npu-smi info` lists those of the machine{visible}. In a container they"
        " must be passed in (`--device /dev/davinci0` ...). Without an NPU, set `Trainer(accelerator='cpu')`."
    )


def foundation() -> dict[str, str]:
    """Return the versions of CANN and of the Ascend driver; empty where torch_npu does not report one.

    Raises:
        ConfigurationError: If `load` raises it.
    """
    torch_npu = load()
    versions = {}
    for name, module in (("CANN", "CANN"), ("Ascend driver", "DRIVER")):
        try:
            versions[name] = str(torch_npu.npu.utils.get_cann_version(module=module))
        except Exception:  # of any class, as in `load`; older versions of torch_npu do not know all modules
            versions[name] = ""
    return versions


def _wanted_torch() -> Requirement | None:
    """Return the torch that torch_npu's distribution requires; None if it requires none, as in some own builds."""
    try:
        texts = importlib.metadata.requires(NAME) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    wanted = [requirement for requirement in map(Requirement, texts) if requirement.name == "torch"]
    return wanted[0] if wanted else None
