"""The one table of environment variables of torch_npu that prevent recovery."""

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass

_NEEDED = "0"
_OFF = {"", "0", "n", "no", "f", "false"}  # the values that torch reads as "off"


@dataclass(frozen=True)
class Setting:
    """A feature of torch_npu that a variable turns on, and that must be off.

    Attributes:
        names: The variable's name, followed by its older names. Which of them are known depends on the version.
        why: What happens if it is on, as the end of a sentence.
        by_default: Whether it is on by default.
    """

    names: tuple[str, ...]
    why: str
    by_default: bool = False


SETTINGS = (
    Setting(
        ("TORCH_HCCL_ASYNC_ERROR_HANDLING", "HCCL_ASYNC_ERROR_HANDLING"),
        "HCCL's watchdog ends a rank whose peer is lost, before it can recover",
        by_default=True,
    ),
    Setting(
        ("TORCH_HCCL_BLOCKING_WAIT", "HCCL_BLOCKING_WAIT"),
        "a rank that waits for a lost one cannot be called back until the collective times out",
    ),
    Setting(
        ("TORCH_HCCL_ENABLE_MONITORING",),
        "a rank may be ended while its device is stopped, because HCCL's watchdog stands still then",
    ),
    Setting(
        ("PYTORCH_NO_NPU_MEMORY_CACHING",),
        "torch_npu cannot tell which tensors a memory error has hit, so a rank with such an error is lost",
    ),
    Setting(
        ("TORCH_NPU_COMPACT_ERROR_OUTPUT",),
        "errors have no code, so some cannot be told from others, and a rank with such an error is lost",
    ),
)
NAMES = tuple(name for setting in SETTINGS for name in setting.names)


@dataclass(frozen=True)
class Harm:
    """A variable whose value prevents recovery.

    Attributes:
        given: "NAME=value".
        advice: Why the value is bad, and what to set.
    """

    given: str
    advice: str


def harms(environ: Mapping[str, str]) -> Iterator[Harm]:
    """Yield the variables of ``environ`` whose values prevent recovery."""
    for setting in SETTINGS:
        for name in setting.names:
            value = environ.get(name, "")
            if value.lower() not in _OFF:
                yield Harm(f"{name}={value}", f"With it, {setting.why}. Set {name}={_NEEDED}.")


def complete(environ: MutableMapping[str, str]) -> None:
    """Turn off what is on by default in torch_npu, unless the user has set the variable."""
    for setting in SETTINGS:
        if setting.by_default and not any(name in environ for name in setting.names):
            environ.update(dict.fromkeys(setting.names, _NEEDED))
