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
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

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


class ByName:
    """Is pickled as Python 3.11.0 to 3.11.3 pickles a member of an enum."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> Any:
        return getattr, (self.owner, self.name)


@pytest.mark.parametrize("foreign", [False, True])
def test_a_member_of_an_enum_by_its_name(foreign: bool) -> None:
    found: Any = read_dcp_metadata(pickle.dumps([ByName(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")]), foreign)
    assert found == [_MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT]


@pytest.mark.parametrize("foreign", [False, True])
@pytest.mark.parametrize(
    ("owner", "name"), [(Metadata, "__init__"), (_MEM_FORMAT_ENCODING, "__class__"), (_MEM_FORMAT_ENCODING, "mro")]
)
def test_no_other_attribute_by_its_name(owner: Any, name: str, foreign: bool) -> None:
    with pytest.raises(pickle.UnpicklingError, match=r"getattr\(.* does not belong in the metadata of a checkpoint"):
        read_dcp_metadata(pickle.dumps(ByName(owner, name)), foreign)


def test_a_member_of_an_enum_that_is_not_known() -> None:
    content = pickle.dumps({"kind": ByName(Kind, "A"), "iteration": 7})
    found: Any = read_dcp_metadata(content, foreign=True)
    assert found["iteration"] == 7
    assert not isinstance(found["kind"], Kind)
    with pytest.raises(pickle.UnpicklingError, match="Kind does not belong"):
        read_dcp_metadata(content)
