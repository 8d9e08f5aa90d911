"""Changes a published checkpoint in such a way that every checksum is right again."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lightning_replica.checkpoint import verification
from lightning_replica.checkpoint.manifest import FileInfo, _crc


def rewrite(path: Path, name: str, content: bytes) -> None:
    """Puts ``content`` in place of a file."""
    manifest = verification.read_manifest(path)
    (path / name).write_bytes(content)
    files = {**manifest.files, name: FileInfo.of_bytes(content)}
    (path / "manifest.json").write_bytes(replace(manifest, files=files).as_bytes())


def change(path: Path, name: str, how: Callable[[Any], Any]) -> None:
    """Changes what a file of torch's holds."""
    read = torch.load(path / name, weights_only=True)
    how(read)
    rewrite(path, name, as_bytes(read))


def as_bytes(content: Any) -> bytes:
    """What ``torch.save`` writes."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def sealed(plain: Any) -> str:
    """A manifest that says ``plain``, with a checksum that is right."""
    content = {key: value for key, value in plain.items() if key != "crc32"}
    return json.dumps({**content, "crc32": _crc(content)})
