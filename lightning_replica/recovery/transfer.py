"""Sending a shard from one rank to another: large chunks, checksummed, received in place, no pickle."""

import json
import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_replica._compat.torch import as_bytes
from lightning_replica.errors import CollectiveError, TransferError

CHUNK_BYTES = 64 * 2**20


class Channel:
    """A one-way line between two ranks of a process group. Sender and receiver make the same calls.

    Args:
        group: The group; both ranks are in it.
        peer: The other end, as a rank of the group.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self._group, self._peer = group, peer
        self.bytes_moved = 0

    def send(self, tensor: Tensor) -> None:
        """Sends a contiguous tensor: its chunks, each followed by its CRC-32."""
        for chunk in _chunks(tensor):
            self._do(chunk, send=True)
            self._do(torch.tensor([_crc(chunk)]), send=True)

    def receive(self, tensor: Tensor) -> None:
        """Fills ``tensor`` in place.

        Raises:
            TransferError: If a chunk is not what was sent.
        """
        for number, chunk in enumerate(_chunks(tensor)):
            self._do(chunk, send=False)
            crc = torch.zeros(1, dtype=torch.int64)
            self._do(crc, send=False)
            if _crc(chunk) != int(crc):
                raise TransferError(f"Chunk {number} of {chunk.numel()} bytes from rank {self._peer} arrived damaged.")

    def send_bytes(self, data: bytes) -> None:
        """Sends its length, then ``data``."""
        self._do(torch.tensor([len(data)]), send=True)
        self.send(_tensor(data))

    def receive_bytes(self) -> bytes:
        """Receives what `send_bytes` sent."""
        length = torch.zeros(1, dtype=torch.int64)
        self._do(length, send=False)
        data = torch.empty(int(length), dtype=torch.uint8)
        self.receive(data)
        return data.numpy().tobytes()

    def send_plain(self, plain: Any) -> None:
        """Sends plain data as JSON."""
        self.send_bytes(json.dumps(plain).encode())

    def receive_plain(self) -> Any:
        """Receives what `send_plain` sent."""
        return json.loads(self.receive_bytes())

    def _do(self, tensor: Tensor, send: bool) -> None:
        try:
            work = self._group.send([tensor], self._peer, 0) if send else self._group.recv([tensor], self._peer, 0)
            work.wait()
        except RuntimeError as error:
            raise CollectiveError(f"Lost rank {self._peer} during a transfer: {error}") from error
        self.bytes_moved += tensor.nbytes


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _chunks(tensor: Tensor) -> list[Tensor]:
    flat = tensor.detach().view(-1).view(torch.uint8)
    return list(flat.split(CHUNK_BYTES)) if flat.numel() else []


def _crc(chunk: Tensor) -> int:
    return zlib.crc32(as_bytes(chunk))
