"""Sending a shard from one rank to another: large chunks, checksummed, received in place, no pickle."""

import json
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_replica._compat.torch import as_bytes
from lightning_replica.errors import TransferError
from lightning_replica.recovery.groups import ProcessGroups
from lightning_replica.works import Work

CHUNK_BYTES = 64 * 2**20


class Channel:
    """A one-way line between two ranks. Both ends make the same calls, in the same order.

    Messages are broadcasts in a group of two, not gloo's send and receive: those cannot be waited for in slices, and
    one that meets a connection which is just being closed may never return.

    Args:
        source: The rank that sends.
        target: The rank that receives.
        groups: Own the group of two while it lasts, so that it is aborted with all others.
        wait: Waits for a collective; raises if the other end is gone or the world moves on.
    """

    def __init__(self, source: int, target: int, groups: ProcessGroups, wait: Callable[[Work], None]) -> None:
        self._source, self._groups, self._wait = source, groups, wait
        self._group = groups.add(sorted((source, target)))
        self.bytes_moved = 0

    def __enter__(self) -> "Channel":
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        if failed is None:  # otherwise all groups are closed in a moment
            self._groups.remove(self._group)

    def send(self, tensor: Tensor) -> None:
        """Sends a contiguous tensor: its chunks, each followed by its CRC-32."""
        for chunk in _chunks(tensor):
            self._move(chunk)
            self._move(torch.tensor([_crc(chunk)]))

    def receive(self, tensor: Tensor) -> None:
        """Fills ``tensor`` in place.

        Raises:
            TransferError: If a chunk is not what was sent.
        """
        for number, chunk in enumerate(_chunks(tensor)):
            self._move(chunk)
            crc = torch.zeros(1, dtype=torch.int64)
            self._move(crc)
            if _crc(chunk) != int(crc):
                raise TransferError(
                    f"Chunk {number} of {chunk.numel()} bytes from rank {self._source} arrived damaged."
                )

    def send_bytes(self, data: bytes) -> None:
        """Sends its length, then ``data``."""
        self._move(torch.tensor([len(data)]))
        self.send(_tensor(data))

    def receive_bytes(self) -> bytes:
        """Receives what `send_bytes` sent."""
        length = torch.zeros(1, dtype=torch.int64)
        self._move(length)
        data = torch.empty(int(length), dtype=torch.uint8)
        self.receive(data)
        return data.numpy().tobytes()

    def send_plain(self, plain: Any) -> None:
        """Sends plain data as JSON."""
        self.send_bytes(json.dumps(plain).encode())

    def receive_plain(self) -> Any:
        """Receives what `send_plain` sent."""
        return json.loads(self.receive_bytes())

    def _move(self, tensor: Tensor) -> None:
        self._wait(dist.broadcast(tensor, self._source, group=self._group, async_op=True))
        self.bytes_moved += tensor.nbytes


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _chunks(tensor: Tensor) -> list[Tensor]:
    flat = tensor.detach().view(-1).view(torch.uint8)
    return list(flat.split(CHUNK_BYTES)) if flat.numel() else []


def _crc(chunk: Tensor) -> int:
    return zlib.crc32(as_bytes(chunk))
