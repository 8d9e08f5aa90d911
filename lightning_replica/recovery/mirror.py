"""Every rank's private state, kept by its peers: a replacement needs it to draw the same random numbers.

[Note: mirrored when]
Private states are mirrored twice a step, each time in one all-gather among the R peers: when a batch window begins
(awaited only when the next mirroring begins, so it costs no time) and before the commit (awaited before this rank
enters it). So when a commit has succeeded on any rank, every peer holds the private state with which the tail of that
step begins. A checksum reveals a message that a fault cut short; the planner then goes back to the tail. The message
before the commit also carries the digest of the rank's shard, so that peers can compare their bits before any of them
enters the commit.
"""

import struct
import zlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_replica._compat.torch import as_bytes
from lightning_replica.core.digests import Digest
from lightning_replica.core.ranges import ranged
from lightning_replica.core.recoverable import Kind
from lightning_replica.core.works import Work, track
from lightning_replica.recovery.planner import Mirror

_HEADER = struct.Struct("<qqqqqq")  # step, length of the payload, CRC-32 of payload and digest, digest
_NO_DIGEST = (-1, 0, 0)
_START_BYTES = 8 * 1024  # grows with the first message that needs more


class Mirrors:
    """Exchanges private states with the peers and remembers the newest of each kind.

    Args:
        rank: This rank.
        wait: Waits for a collective; raises if a peer is gone.
    """

    def __init__(self, rank: int, wait: Callable[[Work], None]) -> None:
        self._rank, self._wait = rank, wait
        self._capacity = _START_BYTES
        # Newest last. After a fault the same state is sent again; the older copy is kept until the newer is complete.
        self._rows: dict[tuple[Kind, int], list[list[Tensor]]] = {}
        self._pending: tuple[Work, Kind, int, bytes, Digest | None] | None = None

    def connect(self, group: dist.ProcessGroup, peers: tuple[int, ...]) -> None:
        """Use ``group``, whose members are ``peers``, from now on. Rows received so far are kept."""
        self._group, self._peers = group, peers
        self._pending = None
        self._capacity = _START_BYTES  # the same on a replacement as on every other rank

    @ranged("mirror")
    def begin(self, kind: Kind, step: int, payload: bytes, digest: Digest | None = None) -> None:
        """Start to send ``payload`` to the peers and to receive theirs. Collective among peers.

        Args:
            kind: Kind of the snapshot.
            step: Step of the snapshot.
            payload: This rank's private state.
            digest: Digest of this rank's shard, if one was taken.
        """
        self.settle()
        if len(self._peers) == 1:
            return
        if kind == "batch":  # every rank has completed the steps before this window
            self._rows = {key: rows for key, rows in self._rows.items() if key[1] >= step}
        self._pending = (self._launch(kind, step, payload, digest), kind, step, payload, digest)

    @ranged("mirror_wait")
    def settle(self) -> None:
        """Wait for what `begin` started. If a payload did not fit, send again with more room."""
        if self._pending is None:
            return
        work, kind, step, payload, digest = self._pending
        self._wait(work)
        needed = max(_HEADER.unpack_from(as_bytes(row))[1] for row in self._rows[kind, step][-1]) + _HEADER.size
        if needed > self._capacity:
            self._capacity = 1 << needed.bit_length()
            self._wait(self._launch(kind, step, payload, digest))
        self._rows[kind, step] = self._rows[kind, step][-1:]
        self._pending = None

    def keep(self, kind: Kind, step: int) -> None:
        """Drop everything except ``kind`` at ``step``, to which all ranks have just returned."""
        self._rows = {key: rows for key, rows in self._rows.items() if key == (kind, step)}

    def held(self) -> tuple[Mirror, ...]:
        """Return which private states of peers this rank holds whole."""
        return tuple(
            Mirror(peer, kind, step)
            for kind, step in self._rows
            for peer in self._peers
            if peer != self._rank and self._find(Mirror(peer, kind, step)) is not None
        )

    def digests(self, step: int) -> dict[int, Digest]:
        """Return the shard digests that this rank and its peers took before the commit that leads to ``step``.

        A peer whose message is not whole is left out.
        """
        rows = self._rows.get(("tail", step), [[]])[-1]
        read = {peer: _read(row, step) for peer, row in zip(self._peers, rows, strict=False)}
        return {peer: message[1] for peer, message in read.items() if message is not None and message[1] is not None}

    def payload(self, mirror: Mirror) -> bytes:
        """Return the private state that ``mirror``, one of `held`, stands for."""
        payload = self._find(mirror)
        if payload is None:
            raise KeyError(f"{mirror} is not whole")
        return payload

    def share(self, target: int, kind: Kind, step: int, own: bytes) -> dict[int, bytes]:
        """Return the peers' states for a replacement ``target``: this rank's own, ``own``, and those held here."""
        found = {peer: self._find(Mirror(peer, kind, step)) for peer in self._peers if peer not in (self._rank, target)}
        return {self._rank: own} | {peer: payload for peer, payload in found.items() if payload is not None}

    def adopt(self, kind: Kind, step: int, payloads: dict[int, bytes]) -> None:
        """Store what a peer has shared: a second fault may come before all ranks have mirrored their states again."""
        rows = [torch.zeros(_HEADER.size, dtype=torch.uint8) for _ in self._peers]
        for peer, payload in payloads.items():
            rows[self._peers.index(peer)] = torch.frombuffer(bytearray(_pack(step, payload, None)), dtype=torch.uint8)
        self._rows[kind, step] = [rows]

    def _find(self, mirror: Mirror) -> bytes | None:
        place = self._peers.index(mirror.rank)
        read = (_read(rows[place], mirror.step) for rows in self._rows[mirror.kind, mirror.step])
        return next((bytes(message[0]) for message in read if message is not None), None)

    def _launch(self, kind: Kind, step: int, payload: bytes, digest: Digest | None) -> Work:
        data = _pack(step, payload, digest)[: self._capacity]
        message = torch.empty(self._capacity, dtype=torch.uint8)  # what follows the data is not looked at
        as_bytes(message)[: len(data)] = data
        rows = list(torch.zeros(len(self._peers), self._capacity, dtype=torch.uint8).unbind())
        self._rows.setdefault((kind, step), []).append(rows)
        # `dist.all_gather` is not used: its checks take as long as the call itself.
        return track(self._group.allgather([rows], [message]))


def _pack(step: int, payload: bytes, digest: Digest | None) -> bytes:
    found = _NO_DIGEST if digest is None else digest.plain
    return _HEADER.pack(step, len(payload), _crc(payload, found), *found) + payload


def _read(row: Tensor, step: int) -> "tuple[memoryview, Digest | None] | None":
    """Return the payload and digest of a message of ``step``, or None if it is not whole."""
    data = as_bytes(row)
    sent, length, crc, *found = _HEADER.unpack_from(data)
    payload = data[_HEADER.size : _HEADER.size + length]
    if not length or sent != step or len(payload) != length or _crc(payload, found) != crc:
        return None
    return payload, None if tuple(found) == _NO_DIGEST else Digest.of(found)


def _crc(payload: "bytes | memoryview", found: Sequence[int]) -> int:
    return zlib.crc32(payload, zlib.crc32(struct.pack("<qqq", *found)))
