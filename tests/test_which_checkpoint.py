from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_replica import ConfigurationError, DyingGaspCheckpoint
from lightning_replica.which_checkpoint import WhichCheckpoint


class Recorder:
    """A callback of the user's that has a directory too."""

    directory = "recordings"


def _fit_impl(model: str, ckpt_path: str | None = None) -> None:
    """As the trainer's."""


def fill_in(callbacks: list[Any]) -> dict[str, Any]:
    which = WhichCheckpoint("auto", is_rank=lambda: True)
    return which.fill_in(SimpleNamespace(callbacks=callbacks), _fit_impl, ("model",), {}).arguments


def test_only_our_callbacks_say_where_checkpoints_are(tmp_path: Path) -> None:
    assert fill_in([Recorder(), DyingGaspCheckpoint(tmp_path)]) == {"model": "model"}
    with pytest.raises(ConfigurationError, match="no callback says where those are"):
        fill_in([Recorder()])
