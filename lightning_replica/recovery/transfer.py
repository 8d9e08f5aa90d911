"""Sending a shard from one rank to another: large chunks, several under way, checksummed, received in place, no pickle.

[Note: a message]
A message consists of header, chunks, seals and answer; then follow the chunks that the answer asks for, their seals, an
answer, and so on. The header says which job, generation and step the message belongs to, and how long it is. A receiver
that expects something else refuses the message before anything is written. The seals are the checksums of the chunks.
Both ends compute them while the next chunks travel. Each checksum covers the header first, so that a chunk of another
message has another checksum. The answer names the chunks that arrived damaged. Data that lies on a device travels
through buffers of the host, chunk by chunk.
"""

import logging
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_replica._compat.torch import as_bytes
from lightning_replica.core import plain
from lightning_replica.core.pending_work import Work, track
from lightning_replica.devices.host import transfer_buffer
from lightning_replica.errors import RecoveryError, TransferError
from lightning_replica.groups.world import ProcessGroups

log = logging.getLogger(__name__)

CHUNK_BYTES = 8 * 2**20
AHEAD = 3  # chunks under way at a time
TRIES = 3  # how often a chunk is sent before its source is given up
VERSION = 1  # of the message format

_Chunk = tuple[int, Tensor]


@dataclass(frozen=True)
class Tag:
    """What a message belongs to.

    Attributes:
        job: The run, as a number that no other run has.
        generation: The generation whose plan sends the message.
        step: The step that the plan brings all ranks to.
        version: Version of the message format.
    """

    job: int
    generation: int
    step: int
    version: int = VERSION


class Channel:
    """A one-way connection between two ranks. Both ends make matching calls, in the same order.

    Messages are broadcasts in a group of two. gloo's send and receive are not used: a rank cannot wait for them in
    slices, and a call that meets a connection which is just being closed may never return.

    Args:
        source: The rank that sends.
        target: The rank that receives.
        groups: This rank's process groups. They own the group of two while it exists, so that it is aborted with all
            others.
        wait: Waits for a collective; raises if the other end is gone or the world moves on.
        tag: What all messages of this channel belong to.

    Attributes:
        bytes_moved: Bytes moved so far, with headers and checksums.
    """

    def __init__(self, source: int, target: int, groups: ProcessGroups, wait: Callable[[Work], None], tag: Tag) -> None:
        self._source, self._target, self._groups, self._wait = source, target, groups, wait
        self._tag, self._messages = tag, 0
        self._began = time.monotonic()
        self._group = groups.add(sorted((source, target)))
        self._buffers: list[Tensor] = []
        self.bytes_moved = 0

    @property
    def seconds(self) -> float:
        """Seconds since the channel was opened."""
        return time.monotonic() - self._began

    def __enter__(self) -> "Channel":
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        if failed is None:  # otherwise all groups are about to be closed
            self._groups.remove(self._group)

    def send(self, tensor: Tensor) -> None:
        """Send a contiguous tensor.

        Raises:
            TransferError: If the tensor does not arrive whole.
        """
        flat = _flat(tensor)
        header = self._header(flat.numel())
        self._move(header, self._source)
        wanted = _chunks(flat)
        for _ in range(TRIES):
            if not wanted:
                return
            seals = torch.tensor([self._seal(header, chunk) for chunk in self._under_way(wanted, sending=True)])
            self._move(seals, self._source)
            wanted = self._answer(wanted, torch.zeros(len(wanted), dtype=torch.uint8))
        if wanted:
            raise self._damaged(wanted)

    def receive(self, tensor: Tensor) -> None:
        """Fill a contiguous tensor in place.

        Raises:
            TransferError: If another message arrives, or a chunk keeps arriving damaged.
        """
        self._receive(lambda length: _flat(tensor) if length == tensor.nbytes else None, tensor.nbytes)

    def send_plain(self, value: Any) -> None:
        """Send plain data, bytes and small tensors."""
        try:
            data = plain.pack(value)
        except plain.NotPlainError as error:
            raise RecoveryError(f"The state of rank {self._source} cannot be sent: {error}.") from error
        self.send(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def receive_plain(self) -> Any:
        """Receive and return what `send_plain` sent."""
        return plain.unpack(as_bytes(self._receive(lambda length: torch.empty(length, dtype=torch.uint8))).tobytes())

    def _receive(self, place: Callable[[int], Tensor | None], expected: int | None = None) -> Tensor:
        expectation = self._header(-1 if expected is None else expected)
        header = torch.zeros_like(expectation)
        self._move(header, self._source)
        flat = self._check(header, expectation, place)
        wanted = _chunks(flat)
        for number in range(TRIES):
            if not wanted:
                return flat
            own = torch.tensor([self._seal(header, chunk) for chunk in self._under_way(wanted, sending=False)])
            seals = torch.zeros_like(own)
            self._move(seals, self._source)
            wanted = self._answer(wanted, (own != seals).to(torch.uint8))
            if wanted:
                log.warning(
                    "rank %d: %d of %d bytes from rank %d arrived damaged, attempt %d of %d",
                    self._target,
                    sum(chunk.numel() for _, chunk in wanted),
                    flat.numel(),
                    self._source,
                    number + 1,
                    TRIES,
                )
        if wanted:
            raise self._damaged(wanted)
        return flat

    def _header(self, length: int) -> Tensor:
        self._messages += 1
        return torch.tensor([*astuple(self._tag), self._messages, length])

    def _check(self, came: Tensor, expected: Tensor, place: Callable[[int], Tensor | None]) -> Tensor:
        """Return the memory for the message if it is the expected one; otherwise raise a `TransferError`."""
        names = [*(field.name for field in fields(Tag)), "message"]
        differences = [
            f"{name} {int(got)}, not {int(due)}"
            for name, got, due in zip(names, came, expected, strict=False)
            if got != due
        ]
        length = int(came[-1])
        flat = place(length) if not differences and length >= 0 else None
        if flat is None:
            what = "; ".join(differences) or f"{length} bytes, not {int(expected[-1])}"
            raise TransferError(f"Rank {self._target} refused a message from rank {self._source}: it has {what}.")
        return flat

    def _under_way(self, chunks: Sequence[_Chunk], sending: bool) -> Iterator[_Chunk]:
        """Move ``chunks``, several at a time, and yield each, in the host's memory, when it can be read."""
        pending: deque[tuple[Work, _Chunk, Tensor]] = deque()
        for place, (number, data) in enumerate(chunks):
            held = self._held(place, data)
            if sending and held is not data:
                held.copy_(data)
            pending.append((self._launch(held, self._source), (number, data), held))
            if sending:
                yield number, held
            if len(pending) == AHEAD:
                yield from self._arrived(pending, sending)
        while pending:
            yield from self._arrived(pending, sending)

    def _arrived(self, pending: "deque[tuple[Work, _Chunk, Tensor]]", sending: bool) -> Iterator[_Chunk]:
        work, (number, data), held = pending.popleft()
        self._wait(work)
        if not sending:
            if held is not data:
                data.copy_(held)
            yield number, held

    def _held(self, place: int, data: Tensor) -> Tensor:
        """Return a chunk's memory while it travels. `AHEAD` buffers suffice: one is free before the next is needed."""
        if self._groups.device.is_host:
            return data
        if not self._buffers:
            self._buffers = [transfer_buffer(CHUNK_BYTES) for _ in range(AHEAD)]
        return self._buffers[place % AHEAD][: data.numel()]

    def _seal(self, header: Tensor, chunk: _Chunk) -> int:
        number, data = chunk
        return zlib.crc32(as_bytes(data), zlib.crc32(as_bytes(header), number))

    def _answer(self, chunks: Sequence[_Chunk], damaged: Tensor) -> list[_Chunk]:
        self._move(damaged, self._target)
        return [chunk for chunk, is_damaged in zip(chunks, damaged.tolist(), strict=True) if is_damaged]

    def _damaged(self, wanted: Sequence[_Chunk]) -> TransferError:
        numbers = ", ".join(str(number) for number, _ in wanted[:8])
        return TransferError(
            f"{len(wanted)} chunks of message {self._messages} from rank {self._source} to rank {self._target}"
            f" (number {numbers}{' ...' if len(wanted) > 8 else ''}) arrived damaged {TRIES} times."
        )

    def _move(self, tensor: Tensor, root: int) -> None:
        self._wait(self._launch(tensor, root))

    def _launch(self, tensor: Tensor, root: int) -> Work:
        self.bytes_moved += tensor.nbytes
        return track(dist.broadcast(tensor, root, group=self._group, async_op=True))


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def _chunks(flat: Tensor) -> list[_Chunk]:
    return list(enumerate(flat.split(CHUNK_BYTES))) if flat.numel() else []
