"""What other programs have pickled is read, and no code runs that it names."""

import argparse
import io
import os
import pickle
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_replica._compat.torch import load_known, read_dcp_metadata


class Kind(Enum):
    """A class that ``weights_only=True`` refuses."""

    A = "a"


class Harmful:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def saved(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def test_what_is_known_is_read_beside_what_is_not() -> None:
    content = {"iteration": 7, "args": argparse.Namespace(lr=0.1), "kind": Kind.A, "weight": torch.arange(3)}
    found = load_known(saved(content))
    assert found["iteration"] == 7
    assert torch.equal(found["weight"], torch.arange(3))
    assert not isinstance(found["kind"], Kind)


def test_no_code_runs(tmp_path: Path) -> None:
    place = tmp_path / "made"
    content = {"iteration": 7, "harm": Harmful(place)}
    assert load_known(saved(content))["iteration"] == 7
    read_dcp_metadata(pickle.dumps(content), foreign=True)
    with pytest.raises(pickle.UnpicklingError):
        read_dcp_metadata(pickle.dumps(content))
    assert not place.exists()
    torch.load(io.BytesIO(saved(content)), weights_only=False)
    assert place.exists(), "the pickle does harm elsewhere"
