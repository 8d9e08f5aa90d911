"""Every rank's private state, kept by its peers: a replacement needs it to draw the same random numbers.

[Note: mirrored when]
Private states are mirrored twice a step, each time in one all-gather among the R peers: when a batch window begins
(awaited only when the next mirroring begins, so it costs no time) and before the commit (awaited before this rank
enters it). So when a commit has succeeded on any rank, every peer holds the private state with which the tail of that
step begins. A checksum reveals a message that a fault cut short; the planner then goes back to the tail. The message
before the commit also carries the digest of the rank's shard, so that peers can compare their bits before any of them
enters the commit.

[Note: only what is new]
Most of a private state is as it was in the message before: outputs that a list collects, states of metrics and
callbacks. A state consists of pieces. A piece that was in the message before, as the same object, is sent as a number.
A peer has that piece: it takes part in an exchange only after it has read the message before, and after any fault all
ranks connect again and send all pieces. Every `_WHOLE_EVERY`-th message has all pieces in it, too, because a peer's
copy may have been damaged.
"""

import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_replica._compat.torch import as_bytes
from lightning_replica.core.digests import Digest
from lightning_replica.core.pending_work import Work, track
from lightning_replica.core.plain import Pieces
from lightning_replica.core.ranges import ranged
from lightning_replica.core.recoverable import Kind
from lightning_replica.recovery.planner import Mirror

_HEADER = struct.Struct("<qqqqqqq")  # step, number of pieces, length of what follows, CRC-32 of the table, digest
_PIECE = struct.Struct("<qqqq")  # number, length, CRC-32, whether it is in this message
_NO_DIGEST = (-1, 0, 0)
_START_BYTES = 8 * 1024  # grows with the first message that needs more
_SMALL_BYTES = 256  # smaller pieces are joined and always sent
_WHOLE_EVERY = 64


@dataclass(frozen=True)
class _Piece:
    """A piece of a state.

    Attributes:
        number: By which the peers know it; 0 if it is sent once.
        data: The bytes.
        crc: Their CRC-32.
    """

    number: int
    data: bytes
    crc: int


@dataclass(frozen=True)
class _Message:
    """What a peer has sent, with all its pieces."""

    step: int
    pieces: tuple[_Piece, ...]
    digest: Digest | None

    @property
    def payload(self) -> bytes:
        return b"".join(piece.data for piece in self.pieces)


_Row: TypeAlias = "Tensor | _Message | None"
"""What has come from a peer: unread, read, or damaged."""


class _Capacity:
    """How many bytes a rank sends and receives of each peer, the same on all peers; messages are cut off behind that.

    Messages with all their pieces and others have capacities of their own.
    """

    def __init__(self) -> None:
        self.whole = self.partial = _START_BYTES
        self._largest = 0  # partial message since the last whole one

    def of(self, is_whole: bool) -> int:
        return self.whole if is_whole else self.partial

    def learn(self, needed: int, is_whole: bool) -> None:
        """Choose the capacities for the next messages. All peers have seen the same messages.

        Args:
            needed: What the largest message of an exchange needed.
            is_whole: Whether these messages had all their pieces.
        """
        if is_whole:
            self.whole, self.partial, self._largest = _room_for(needed), _room_for(self._largest), 0
        else:
            self._largest = max(self._largest, needed)
            self.partial = max(self.partial, _room_for(needed))


def _room_for(needed: int) -> int:
    return max(_START_BYTES, 1 << needed.bit_length())


class _Sender:
    """Numbers the pieces that this rank sends, and remembers which of them its last message had."""

    def __init__(self) -> None:
        self._next = 1
        self._last: dict[int, _Piece] = {}

    def pieces(self, payload: Pieces) -> tuple[list[_Piece], frozenset[int]]:
        """Return the pieces of a message, and the numbers of those that the message before had, too."""
        found, small = list[_Piece](), list[bytes]()
        for data in payload.parts:
            if len(data) < _SMALL_BYTES:
                small.append(data)
                continue
            found += self._joined(small)
            small = []
            known = self._last.get(id(data))
            if known is None:
                known = _Piece(self._next, data, zlib.crc32(data))
                self._next += 1
            found.append(known)
        found += self._joined(small)
        before = frozenset(piece.number for piece in self._last.values())
        self._last = {id(piece.data): piece for piece in found if piece.number}
        return found, before

    def _joined(self, small: list[bytes]) -> list[_Piece]:
        data = b"".join(small)
        return [_Piece(0, data, zlib.crc32(data))] if data else []


class Mirrors:
    """Exchanges private states with the peers and remembers the newest of each kind.

    Args:
        rank: This rank.
        wait: Waits for a collective; raises if a peer is gone.
    """

    def __init__(self, rank: int, wait: Callable[[Work], None]) -> None:
        self._rank, self._wait = rank, wait
        self._sender, self._count = _Sender(), 0
        self._capacity = _Capacity()
        # Newest last. After a fault the same state is sent again; the older copy is kept until the newer is complete.
        self._rows: dict[tuple[Kind, int], list[list[_Row]]] = {}
        self._received: dict[int, dict[int, _Piece]] = {}  # by place of a peer, the pieces of its last message
        self._pending: tuple[Work, Kind, int, bytes, bool] | None = None

    def connect(self, group: dist.ProcessGroup, peers: tuple[int, ...]) -> None:
        """Use ``group``, whose members are ``peers``, from now on. Rows received so far are kept."""
        self._group, self._peers = group, peers
        for (_, step), known in self._rows.items():
            known[:] = [[self._message(place, row, step) for place, row in enumerate(rows)] for rows in known]
        self._count, self._received, self._pending = 0, {}, None  # the first message has all pieces
        self._capacity = _Capacity()  # the same on a replacement as on every other rank

    @ranged("mirror")
    def begin(self, kind: Kind, step: int, payload: Pieces, digest: Digest | None = None) -> None:
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
        is_whole = self._count % _WHOLE_EVERY == 0
        self._count += 1
        pieces, known = self._sender.pieces(payload)
        message = _pack(step, pieces, frozenset() if is_whole else known, digest)
        self._pending = self._launch(kind, step, message, self._capacity.of(is_whole)), kind, step, message, is_whole

    @ranged("mirror_wait")
    def settle(self) -> None:
        """Wait for what `begin` started. If a payload did not fit, send again with more room."""
        if self._pending is None:
            return
        work, kind, step, message, is_whole = self._pending
        self._wait(work)
        needed = max(_needed(row) for row in self._rows[kind, step][-1] if isinstance(row, Tensor))
        if needed > self._capacity.of(is_whole):
            self._wait(self._launch(kind, step, message, _room_for(needed)))
        rows = [self._message(place, row, step) for place, row in enumerate(self._rows[kind, step][-1])]
        rows[self._peers.index(self._rank)] = None  # this rank has its own
        self._rows[kind, step] = [[*rows]]
        for place, found in enumerate(rows):
            if found is not None:
                self._received[place] = {piece.number: piece for piece in found.pieces}
        self._capacity.learn(needed, is_whole)
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
        """Return the shard digests that the peers took before the commit that leads to ``step``.

        A peer whose message is not whole is left out.
        """
        rows = self._rows.get(("tail", step), [[]])[-1]
        read = {self._peers[place]: self._message(place, row, step) for place, row in enumerate(rows)}
        return {peer: found.digest for peer, found in read.items() if found is not None and found.digest is not None}

    def payload(self, mirror: Mirror) -> bytes:
        """Return the private state that ``mirror``, one of `held`, stands for."""
        message = self._find(mirror)
        if message is None:
            raise KeyError(f"{mirror} is not whole")
        return message.payload

    def share(self, target: int, kind: Kind, step: int, own: bytes) -> dict[int, bytes]:
        """Return the peers' states for a replacement ``target``: this rank's own, ``own``, and those held here."""
        found = {peer: self._find(Mirror(peer, kind, step)) for peer in self._peers if peer not in (self._rank, target)}
        return {self._rank: own} | {peer: each.payload for peer, each in found.items() if each is not None}

    def adopt(self, kind: Kind, step: int, payloads: dict[int, bytes]) -> None:
        """Store what a peer has shared: a second fault may come before all ranks have mirrored their states again."""
        shared = {peer: _Message(step, (_Piece(0, payload, 0),), None) for peer, payload in payloads.items()}
        self._rows[kind, step] = [[shared.get(peer) for peer in self._peers]]

    def _find(self, mirror: Mirror) -> _Message | None:
        place = self._peers.index(mirror.rank)
        read = (self._message(place, rows[place], mirror.step) for rows in self._rows[mirror.kind, mirror.step])
        return next((message for message in read if message is not None), None)

    def _message(self, place: int, row: _Row, step: int) -> _Message | None:
        """Return what has come from the peer at ``place``; None if it is not whole."""
        if isinstance(row, Tensor):
            return _read(as_bytes(row), step, self._received.get(place, {}))
        return row

    def _launch(self, kind: Kind, step: int, data: bytes, capacity: int) -> Work:
        data = data[:capacity]
        message = torch.empty(capacity, dtype=torch.uint8)  # what follows the data is not looked at
        as_bytes(message)[: len(data)] = data
        rows = list(torch.zeros(len(self._peers), capacity, dtype=torch.uint8).unbind())
        self._rows.setdefault((kind, step), []).append([*rows])
        # `dist.all_gather` is not used: its checks take as long as the call itself.
        return track(self._group.allgather([rows], [message]))


def _needed(row: Tensor) -> int:
    length: int = _HEADER.unpack_from(as_bytes(row))[2]
    return _HEADER.size + length


def _pack(step: int, pieces: Sequence[_Piece], known: frozenset[int], digest: Digest | None) -> bytes:
    """Return a message with all pieces but for the data of those that are ``known``."""
    found = _NO_DIGEST if digest is None else digest.plain
    table = [_PIECE.pack(piece.number, len(piece.data), piece.crc, piece.number not in known) for piece in pieces]
    entries = b"".join(table)
    data = [piece.data for piece in pieces if piece.number not in known]
    length = len(entries) + sum(map(len, data))
    head = _HEADER.pack(step, len(pieces), length, _crc(step, entries, found), *found)
    return b"".join((head, entries, *data))


def _read(data: memoryview, step: int, known: Mapping[int, _Piece]) -> _Message | None:
    """Return a message of ``step`` with all pieces, or None if it is not whole."""
    sent, count, length, table_crc, *found = _HEADER.unpack_from(data)
    body = data[_HEADER.size : _HEADER.size + length]
    entries = body[: count * _PIECE.size]
    if sent != step or count <= 0 or len(body) != length or len(entries) != count * _PIECE.size:
        return None
    if _crc(step, entries, found) != table_crc:
        return None
    pieces, start = list[_Piece](), len(entries)
    for number, size, crc, is_here in _PIECE.iter_unpack(entries):
        piece = known.get(number)
        if is_here:
            piece = _Piece(number, bytes(body[start : start + size]), crc)
            start += size
            if zlib.crc32(piece.data) != crc:
                return None
        if piece is None or (len(piece.data), piece.crc) != (size, crc):
            return None
        pieces.append(piece)
    return _Message(step, tuple(pieces), None if tuple(found) == _NO_DIGEST else Digest.of(found))


def _crc(step: int, entries: "bytes | memoryview", found: Sequence[int]) -> int:
    return zlib.crc32(entries, zlib.crc32(struct.pack("<qqqq", step, *found)))
