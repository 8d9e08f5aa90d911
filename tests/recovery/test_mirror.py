"""What peers keep for each other: any size, only what is new, and nothing that is not whole."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_replica.core.digests import Digest
from lightning_replica.core.plain import Pieces
from lightning_replica.recovery import mirror
from lightning_replica.recovery.mirror import Mirrors
from lightning_replica.recovery.planner import Mirror
from tests.support.ranks import open_world, run_ranks
from tests.support.typed import world_group


def wait(work: Any) -> None:
    if work is not None:
        work.wait()


def payload(rank: int, size: int) -> bytes:
    return bytes([rank + 1]) * size


def exchange(rank: int, store: Any) -> Any:
    open_world(rank, store, 3)
    mirrors = Mirrors(rank, wait)
    mirrors.connect(world_group(), (0, 1, 2))
    seen = []
    for step, sizes in enumerate([(10, 10, 10), (10, 50_000, 10), (200_000, 1, 60_000)]):
        digests = {peer: Digest(7, -(2**62) + peer, peer == step) for peer in range(3)}
        mirrors.begin("tail", step, Pieces([payload(rank, sizes[rank])]), digests[rank])
        mirrors.settle()
        assert mirrors.digests(step) == {peer: digests[peer] for peer in range(3) if peer != rank}
        seen.append(
            all(
                mirrors.payload(Mirror(peer, "tail", step)) == payload(peer, sizes[peer])
                for peer in range(3)
                if peer != rank
            )
        )
    steps = sorted({mirror.step for mirror in mirrors.held()})
    mirrors.begin("batch", 2, Pieces([b"batch"]))
    mirrors.settle()
    assert mirrors.digests(3) == {}
    kept = sorted({(mirror.kind, mirror.step) for mirror in mirrors.held()})
    mirrors.keep("batch", 2)
    # A replacement holds its peers' states before any collective.
    target = (rank + 1) % 3
    shared = mirrors.share(target, "batch", 2, b"own")
    new = Mirrors(target, wait)
    new.connect(world_group(), (0, 1, 2))
    new.adopt("batch", 2, shared)
    held = {peer: new.payload(Mirror(peer, "batch", 2)) for peer in range(3) if peer != target}
    seen.append(held == shared and held[rank] == b"own")
    return [seen, steps, kept, sorted({(mirror.kind, mirror.step) for mirror in mirrors.held()})]


def test_payloads_of_any_size_arrive_and_old_ones_go() -> None:
    for seen, steps, kept, last in run_ranks(3, exchange):
        assert seen == [True, True, True, True]
        assert steps == [0, 1, 2]
        assert kept == [["batch", 2], ["tail", 2]]
        assert last == [["batch", 2]]


def damage(rank: int, store: Any) -> Any:
    open_world(rank, store, 2)
    mirrors = Mirrors(rank, wait)
    mirrors.connect(world_group(), (0, 1))
    found = []
    for place in (40, 70, 90):  # in the head, in the table, in the payload
        mirrors.begin("tail", 4, Pieces([b"private"]))
        mirrors.settle()
        assert mirrors.digests(4) == {}  # none was sent
        found.append([mirror.rank for mirror in mirrors.held()])
        # The newer copy of the same state is cut short; the older one still serves.
        mirrors.begin("tail", 4, Pieces([b"private"]))
        settled(mirrors)[1 - rank][place:] = 0
        found.append([mirror.rank for mirror in mirrors.held()])
        mirrors._rows["tail", 4][0] = [None, None]
        found.append([mirror.rank for mirror in mirrors.held()])
        mirrors._pending = None
    return found


def settled(mirrors: Mirrors) -> list[Any]:
    """What has come of the message under way, before it is looked at."""
    assert mirrors._pending is not None
    wait(mirrors._pending[0])
    return mirrors._rows["tail", 4][-1]


def lie(rank: int, store: Any) -> Any:
    open_world(rank, store, 2)
    mirrors = Mirrors(rank, wait)
    mirrors.connect(world_group(), (0, 1))
    mirrors.begin("tail", 4, Pieces([b"private"]), Digest(9, 8, False))
    for row in settled(mirrors):
        row[40] += 1  # in the digest
    mirrors.settle()
    return list(mirrors.digests(4))


def test_a_damaged_digest_is_not_heard() -> None:
    assert run_ranks(2, lie) == [[], []]


def test_a_damaged_message_is_not_held() -> None:
    assert run_ranks(2, damage) == [[[1], [1], []] * 3, [[0], [0], []] * 3]


def grow(rank: int, store: Any) -> Any:
    """Each message has a piece more than the one before. Returns how much was sent, and what was not whole."""
    open_world(rank, store, 2)
    mirrors = Mirrors(rank, wait)
    mirrors.connect(world_group(), (0, 1))
    mirror._WHOLE_EVERY = 16
    pieces: list[bytes] = []
    sent, lost, launched, whole = [], [], [], True
    launch = mirrors._launch
    mirrors._launch = lambda *message: launched.append(step) or launch(*message)  # type: ignore[func-returns-value, method-assign]
    for step in range(1, 40):
        pieces.append(bytes([step, rank]) * 4000)
        if step == 30:
            del pieces[3:20]
        mirrors.begin("batch", step, Pieces([b"small", *pieces, b"s", bytes([step])]))
        assert mirrors._pending is not None
        sent.append(len(mirrors._pending[3]))
        if step == 36:
            wait(mirrors._pending[0])
            mirrors.connect(world_group(), (0, 1))  # before it was read
        else:
            mirrors.settle()
        other = Mirror(1 - rank, "batch", step)
        expected = b"small" + b"".join(bytes([each[0], 1 - rank]) * 4000 for each in pieces) + b"s" + bytes([step])
        if other in mirrors.held():
            whole &= mirrors.payload(other) == expected
        else:
            lost.append(step)
        if step == 20:  # a bit flips in what is kept
            received = mirrors._received[1 - rank]
            number = max(received)
            received[number] = mirror._Piece(number, received[number].data, received[number].crc + 1)
    return [sent, lost, whole, [step for step in {*launched} if launched.count(step) > 1]]


def test_only_what_is_new_is_sent() -> None:
    for sent, lost, whole, twice in run_ranks(2, grow):
        assert whole
        assert lost == [*range(21, 33)]  # until a message has all pieces
        all_of_it = [step for step, size in enumerate(sent, start=1) if size > 20_000]
        assert all_of_it == [17, 33, 37]
        assert sorted(twice) == [3, 17, 37, 38]  # there was not room enough


RANKS = 3


class Wire:
    """An all-gather among threads; some of them are told that a peer is gone, though their messages have come."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(RANKS, timeout=60)
        self._sent: dict[int, Any] = {}
        self._broken: dict[int, tuple[frozenset[int], int]] = {}

    def begin(self, rank: int, broken: frozenset[int]) -> None:
        """Begin an exchange, which some ranks do not see end; then nobody can begin another one."""
        self._broken[rank] = broken, 0

    def group(self, rank: int) -> Any:
        wire = self

        class Group:
            def allgather(self, rows: Any, message: Any) -> Any:
                return lambda: wire._gather(rank, rows[0], message[0])

        return Group()

    def _gather(self, rank: int, rows: Any, message: Any) -> None:
        broken, count = self._broken[rank]
        self._broken[rank] = broken, count + 1
        if broken and count:
            raise ConnectionError("a peer is gone")
        self._sent[rank] = message
        self._barrier.wait()
        for peer, row in enumerate(rows):
            row.copy_(self._sent[peer])
        self._barrier.wait()
        if rank in broken:
            raise ConnectionError("a peer is gone")


def live(rank: int, wires: list[Wire], seed: int) -> int:
    """Mirrors a state that changes, with faults. Returns how often a peer's state was looked at."""
    dice = random.Random(seed)  # the same in all ranks
    states: list[list[bytes]] = [[] for _ in range(RANKS)]
    sent: dict[tuple[Any, int], list[bytes]] = {}
    mirrors, number, looked = Mirrors(rank, lambda work: work()), 0, 0  # type: ignore[misc, operator]
    mirrors.connect(wires[0].group(rank), tuple(range(RANKS)))
    for step in range(30):
        for kind in ("batch", "tail"):
            for state in states:
                grown = [dice.randbytes(dice.choice([9, 300, 5000])) for _ in range(dice.randrange(3))]
                del state[len(state) - dice.randrange(1 + len(state)) // 3 :]
                state[dice.randrange(1 + len(state)) : 0] = grown
            sent[kind, step] = [b"".join(state) for state in states]
            broken = frozenset(each for each in range(RANKS) if dice.random() < 0.5) if dice.random() < 0.1 else None
            wires[number].begin(rank, broken or frozenset())
            is_settled = True
            try:
                mirrors.begin(kind, step, Pieces([bytes([step]), *states[rank]]))
                mirrors.settle()
            except ConnectionError:
                is_settled = False
            if broken:
                number += 1
                mirrors.connect(wires[number].group(rank), tuple(range(RANKS)))
            held = mirrors.held()
            assert {each.rank for each in held} <= {*range(RANKS)} - {rank}
            assert not is_settled or sum((each.kind, each.step) == (kind, step) for each in held) == RANKS - 1
            for each in held:
                looked += 1
                assert mirrors.payload(each) == bytes([each.step]) + sent[each.kind, each.step][each.rank]
    return looked


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**9))
def test_whatever_is_held_is_what_the_peer_sent(seed: int) -> None:
    wires = [Wire() for _ in range(70)]
    with pytest.MonkeyPatch.context() as patched, ThreadPoolExecutor(RANKS) as ranks:
        patched.setattr(mirror, "_WHOLE_EVERY", 7)
        patched.setattr(mirror, "track", lambda work: work)
        looked = [each.result() for each in [ranks.submit(live, rank, wires, seed) for rank in range(RANKS)]]
    assert min(looked) > 100
