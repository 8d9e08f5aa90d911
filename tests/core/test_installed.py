"""Which files belong to an installed package."""

import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_replica.core import user_code
from lightning_replica.core.user_code import is_installed, is_users


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One that `pip install --target` has filled."""
    record = tmp_path / "tool-1.0.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text("tool/__init__.py,sha256=x,3\n../bin/tool,,\n.,,\nsingle.py,,\n" + "x" * 200_000 + ",,\n")
    odd: list[Any] = [str(tmp_path), tmp_path, b"bytes", ""]
    monkeypatch.setattr(sys, "path", [*odd, *sys.path])
    user_code._installed_in.cache_clear()
    return tmp_path


def test_what_pip_has_put_into_a_folder(folder: Path) -> None:
    assert is_installed(str(folder / "tool" / "__init__.py"))
    assert is_installed(str(folder / "single.py"))
    assert not is_installed(str(folder / "mine" / "__init__.py"))
    assert is_users(str(folder / "mine.py"))
