"""The checks of `lightning-replica doctor` that need an installed torch_npu."""

import os
from collections.abc import Iterator

from lightning_replica.cli.check import Check
from lightning_replica.devices import npu_contract, npu_package, npu_settings
from lightning_replica.errors import ConfigurationError


def ascend() -> Iterator[Check]:
    """Check torch_npu, what it is built on, and its settings; yield nothing if it is not installed."""
    if not npu_package.is_installed():
        return
    yield from _settings()
    try:
        foundation = npu_package.foundation()
    except ConfigurationError as error:
        yield Check("torch_npu", "failed", *str(error).split(". ", 1))
        return
    yield Check("torch_npu", "ok", npu_package.version())
    for name, found in foundation.items():
        yield Check(name, "ok", found) if found else Check(name, "note", "not known")
    yield _calls()


def _settings() -> Iterator[Check]:
    harms = list(npu_settings.harms(os.environ))
    for harm in harms:
        yield Check("HCCL settings", "note", harm.given, harm.advice)
    if not harms:
        yield Check("HCCL settings", "ok", "no setting prevents recovery")


def _calls() -> Check:
    differences = list(npu_contract.differences())
    if not differences:
        return Check("torch_npu calls", "ok", f"all {len(npu_contract.CALLS)} are as expected")
    advice = "Install another version of torch_npu, and please report this one."
    return Check("torch_npu calls", "failed", "; ".join(differences), advice)
