"""The planner by case and by property. The commit rule behind it is explored in test_exploration.py."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_replica.core.grid import Grid
from lightning_replica.errors import ProtocolError, RecoveryError
from lightning_replica.recovery.planner import Mirror, Move, Report, make_plan

GRID = Grid.of(4, 2)


def at(rank: int, step: int = 5, **changes: Any) -> Report:
    """A rank in its forward pass of ``step``, with whatever its peer sent."""
    peer = (rank + 2) % 4
    mirrors = (Mirror(peer, "tail", step), Mirror(peer, "batch", step))
    return replace(Report(rank, step, True, False, step, (1.0,), (step,), (step,), mirrors), **changes)


def replacement(rank: int) -> Report:
    return Report(rank, -1, False, False, -1, (), (), ())


def test_exception_before_the_commit_does_the_batch_again() -> None:
    plan = make_plan([at(0), at(1, raised="ValueError: x"), at(2), at(3)], GRID, 3)
    assert (plan.step, plan.kind, plan.forward, plan.moves) == (5, "batch", (), ())


@pytest.mark.parametrize(
    ("changes", "resumed"),
    [
        ({}, True),
        ({"links": (True, True)}, False),  # its last collective had just made one
        ({"links": ()}, False),
        ({"is_replacement": True}, False),
        ({"resumed": 4}, True),
        ({"resumed": 5}, False),  # and then came this
    ],
)
def test_connections_go_on_where_all_have_the_same(changes: dict[str, Any], resumed: bool) -> None:
    links = (True, False)
    reports = [at(rank, links=links) for rank in range(3)]
    assert make_plan([*reports, at(3, **{"links": links, **changes})], GRID, 3).resume is resumed


def test_connections_that_nobody_has_are_made() -> None:
    assert not make_plan([at(rank, links=(False, False)) for rank in range(4)], GRID, 3).resume


def test_a_lost_rank_gets_everything_from_its_peer() -> None:
    plan = make_plan([at(0), replacement(1), at(2), at(3)], GRID, 3)
    assert (plan.step, plan.kind, plan.moves) == (5, "batch", (Move(3, 1, host=True),))


def test_one_who_saw_the_commit_takes_all_forward() -> None:
    entered: dict[str, Any] = {"entered": True, "tail": (5, 6)}
    mirrors = (Mirror(1, "tail", 6),)
    reports = [
        at(0, **entered),
        replacement(1),
        at(2, **entered, committed=6, commit=(2.5,)),
        at(3, **entered, mirrors=mirrors),
    ]
    plan = make_plan(reports, GRID, 3)
    assert (plan.step, plan.kind, plan.commit, plan.forward) == (6, "tail", (2.5,), (0, 2, 3))
    assert plan.moves == (Move(3, 1, host=True),)


def test_a_torn_shard_comes_from_the_peer_but_the_host_state_stays() -> None:
    torn = at(0, intact=False, committed=6, commit=(2.5,), tail=(5, 6))
    done: dict[str, Any] = {"step": 6, "committed": 6, "commit": (2.5,), "tail": (5, 6), "batch": (5,)}
    plan = make_plan([torn, at(1, **done), at(2, **done), at(3, **done)], GRID, 3)
    assert (plan.step, plan.kind, plan.forward, plan.moves) == (6, "tail", (), (Move(2, 0, host=False),))


def corrupted(rank: int, **changes: Any) -> Report:
    return at(rank, intact=False, corrupted=f"bits of rank {rank}", **changes)


def test_a_corrupted_shard_comes_from_the_peer_and_the_tail_is_done_again() -> None:
    """The tail may have seen parameters made of wrong bits."""
    plan = make_plan([at(0), corrupted(1), at(2), at(3)], GRID, 3)
    assert (plan.step, plan.kind, plan.forward, plan.moves) == (5, "tail", (), (Move(3, 1, host=False),))


def test_the_tail_is_done_again_though_whoever_found_wrong_bits_is_lost() -> None:
    """Others know; its peers may have seen parameters made of wrong bits all the same."""
    others = [at(0, corruption_seen=True), at(2, corruption_seen=True), at(3, corruption_seen=True)]
    plan = make_plan([others[0], replacement(1), *others[1:]], GRID, 3)
    assert (plan.step, plan.kind, plan.moves) == (5, "tail", (Move(3, 1, host=True),))
    assert make_plan([at(0), replacement(1), at(2), at(3)], GRID, 3).kind == "batch"


def test_with_a_corrupted_shard_the_batch_is_done_again_where_the_tail_is_forgotten() -> None:
    """As after another recovery that went back to the batch."""
    mirrored = [at(rank, tail=(), mirrors=(Mirror((rank + 2) % 4, "batch", 5),)) for rank in range(4)]
    mirrored[1] = replace(mirrored[1], intact=False, corrupted="bits")
    plan = make_plan(mirrored, GRID, 3)
    assert (plan.kind, plan.moves) == ("batch", (Move(3, 1, host=False),))


def test_a_shard_corrupted_after_the_commit_is_left_out_of_rolling_forward() -> None:
    entered: dict[str, Any] = {"entered": True, "tail": (5, 6)}
    seen = {**entered, "committed": 6, "commit": (2.5,)}
    plan = make_plan([at(0, **entered), corrupted(1, **seen), at(2, **entered), at(3, **entered)], GRID, 3)
    assert (plan.step, plan.kind, plan.forward, plan.moves) == (6, "tail", (0, 2, 3), (Move(3, 1, host=False),))


def test_corrupted_shards_are_replaced_by_the_majority_only() -> None:
    grid = Grid.of(3, 3)
    reports = [corrupted(0), at(1), at(2)]
    mirrors = tuple(Mirror(rank, kind, 5) for rank in range(3) for kind in ("tail", "batch"))
    plan = make_plan([replace(report, mirrors=mirrors) for report in reports], grid, 3)
    assert plan.moves == (Move(1, 0, host=False),)


def test_a_tail_that_one_rank_has_not_finished_is_done_again_by_all() -> None:
    plan = make_plan([at(0), at(1, batch=(4,)), at(2), at(3)], GRID, 3)
    assert (plan.step, plan.kind) == (5, "tail")


def test_a_lost_rank_whose_batch_start_was_not_mirrored_goes_back_to_the_tail() -> None:
    plan = make_plan([at(0), replacement(1), at(2), at(3, mirrors=(Mirror(1, "tail", 5),))], GRID, 3)
    assert (plan.step, plan.kind) == (5, "tail")


def test_sources_share_the_load() -> None:
    grid = Grid.of(3, 3)
    mirrors = tuple(Mirror(rank, kind, 5) for rank in range(3) for kind in ("tail", "batch"))
    reports = [at(0, mirrors=mirrors), replacement(1), replacement(2)]
    assert {move.source for move in make_plan(reports, grid, 3).moves} == {0}
    grid = Grid.of(4, 4)
    mirrors = tuple(Mirror(rank, kind, 5) for rank in range(4) for kind in ("tail", "batch"))
    reports = [at(0, mirrors=mirrors), at(1, mirrors=mirrors), replacement(2), replacement(3)]
    assert {move.source for move in make_plan(reports, grid, 3).moves} == {0, 1}


@pytest.mark.parametrize(
    ("reports", "message"),
    [
        ([replacement(r) for r in range(4)], "Every rank is lost"),
        ([at(r, raised="ValueError: bad batch") for r in range(4)], "Every rank raised.*bad batch"),
        ([at(0), replacement(1), at(2), replacement(3)], r"Every holder of shard 1 is lost \(ranks 1, 3\).*replicas=2"),
        (
            [at(0), corrupted(1), at(2), corrupted(3)],
            r"Shard 1 is lost at step 5: .*\(ranks 1, 3\) can be trusted. bits of rank 1. bits of rank 3. Resume from",
        ),
        ([corrupted(rank) for rank in range(4)], "Shard 0 is lost at step 5.*bits of rank 0. bits of rank 2"),
        ([at(0), corrupted(1), at(2), replacement(3)], "Shard 1 is lost at step 5.*bits of rank 1"),
        ([at(0), corrupted(1, tries=3), at(2), at(3)], "failed 4 times .*rank 1: bits of rank 1"),
        ([at(0), at(1, tries=3, device="UCE ERROR"), at(2), at(3)], "failed 4 times .*rank 1: UCE ERROR"),
        ([at(0, tries=3, raised="ValueError: x"), at(1), at(2), at(3)], r"failed 4 times \(max_tries=3\).*rank 0: Val"),
        ([at(0), replacement(1), at(2), at(3, mirrors=())], "No peer of rank 1 holds its random state"),
    ],
)  # fmt: skip
def test_hopeless(reports: list[Report], message: str) -> None:
    with pytest.raises(RecoveryError, match=message):
        make_plan(reports, GRID, 3)


def test_reports_against_the_rule() -> None:
    with pytest.raises(ProtocolError, match="Step 6 is committed"):
        make_plan([at(0), at(1), at(2, committed=6), at(3)], GRID, 3)


def test_a_report_survives_the_store() -> None:
    report = at(1, commit=(0.1 + 0.2, 1e-300), raised="é")
    import json

    assert Report.from_plain(json.loads(json.dumps(report.to_plain()))) == report


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 6), st.data())
def test_whoever_can_be_saved_is_saved(replicas: int, shards: int, data: st.DataObject) -> None:
    """For any set of lost ranks: a plan exists exactly if every shard has a live holder, and covers every lost rank."""
    if replicas * shards < 2:
        return
    grid = Grid.of(replicas * shards, replicas)
    lost = data.draw(st.sets(st.integers(0, grid.size - 1)))
    reports = []
    for rank in range(grid.size):
        mirrors = tuple(Mirror(p, k, 5) for p in grid.peers(rank) for k in ("tail", "batch") if p != rank)
        reports.append(replacement(rank) if rank in lost else at(rank, mirrors=mirrors))
    covered = all(set(grid.peers(rank)) - lost for rank in range(grid.size))
    if not covered:
        with pytest.raises(RecoveryError):
            make_plan(reports, grid, 3)
        return
    plan = make_plan(reports, grid, 3)
    assert {move.target for move in plan.moves} == lost
    assert all(move.source in grid.peers(move.target) and move.source not in lost for move in plan.moves)


def healthy(grid: Grid, lost: set[int]) -> list[Report]:
    """All in the forward pass of step 5 but ``lost``, with everything mirrored."""
    reports = []
    for rank in range(grid.size):
        mirrors = tuple(
            Mirror(peer, kind, 5) for peer in grid.peers(rank) for kind in ("tail", "batch") if peer != rank
        )
        reports.append(replacement(rank) if rank in lost else at(rank, mirrors=mirrors))
    return reports


# MindIO's default replica manager: ranks sorted, offset = size / replicas, shard i on i, i + offset, i + 2 offset ...;
# the source of a lost rank is the next healthy one in that row. Where only one holder is left there is one answer.
@pytest.mark.parametrize(
    ("world_size", "replicas", "lost", "theirs"),
    [
        (4, 2, {0}, {0: 2}),
        (4, 2, {3}, {3: 1}),
        (4, 2, {0, 1}, {0: 2, 1: 3}),  # half of the ranks, the best case
        (4, 2, {2, 3}, {2: 0, 3: 1}),
        (4, 2, {0, 3}, {0: 2, 3: 1}),
        (4, 2, {1, 3}, None),  # both holders, the worst case
        (8, 2, {0, 1, 2, 3}, {0: 4, 1: 5, 2: 6, 3: 7}),
        (8, 2, {1, 4, 6, 7}, {1: 5, 4: 0, 6: 2, 7: 3}),
        (8, 2, {0, 1, 2, 3, 4}, None),
        (6, 3, {0, 3, 5}, {0: 2, 3: 1, 5: 1}),
        (6, 3, {0, 2, 4}, None),
        (3, 3, {1, 2}, {1: 0, 2: 0}),
        (8, 4, {1, 3, 5}, {1: 7, 3: 7, 5: 7}),
    ],
)
def test_the_truth_table_of_the_reference(
    world_size: int, replicas: int, lost: set[int], theirs: dict[int, int] | None
) -> None:
    grid = Grid.of(world_size, replicas)
    reports = healthy(grid, lost)
    if theirs is None:
        with pytest.raises(RecoveryError, match="Every holder of shard"):
            make_plan(reports, grid, 3)
        return
    moves = {move.target: move.source for move in make_plan(reports, grid, 3).moves}
    assert moves.keys() == theirs.keys()
    for target, source in moves.items():
        left = set(grid.peers(target)) - lost
        assert source in left
        assert theirs[target] in left
        if len(left) == 1:
            assert source == theirs[target]


def test_where_we_differ_from_the_reference() -> None:
    """Theirs always takes the next in the row; ours whoever has the least to send."""
    grid = Grid.of(8, 4)
    moves = {move.target: move.source for move in make_plan(healthy(grid, {1, 5}), grid, 3).moves}
    assert moves == {1: 3, 5: 7}  # theirs: 1 from 3, 5 from 7 too
    moves = {move.target: move.source for move in make_plan(healthy(grid, {1, 7}), grid, 3).moves}
    assert moves == {1: 3, 7: 5}  # theirs: 3 gives to both (7 + 2 comes round to 1, which is lost, then 3)


def test_whose_data_arrived_damaged_is_asked_last() -> None:
    grid = Grid.of(3, 3)
    reports = healthy(grid, {2})
    reports[2] = replace(reports[2], damaged_from=(0,))
    assert make_plan(reports, grid, 3).moves == (Move(1, 2, True),)
    reports[2] = replace(reports[2], damaged_from=(0, 1))
    assert make_plan(reports, grid, 3).moves == (Move(0, 2, True),)


def test_twice_the_ranks_is_twice_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in looks at the table of ranks, and in reports that are looked at."""

    def looks(world_size: int) -> int:
        count = 0
        original = Grid.peers

        def counted(self: Grid, rank: int) -> tuple[int, ...]:
            nonlocal count
            count += 1
            return original(self, rank)

        class Counted(list[Report]):
            def __getitem__(self, place: Any) -> Any:
                nonlocal count
                count += 1
                return super().__getitem__(place)

        grid = Grid.of(world_size, 2)
        reports = Counted(healthy(grid, set(range(world_size // 4))))
        with monkeypatch.context() as patch:
            patch.setattr(Grid, "peers", counted)
            make_plan(reports, grid, 3)
        return count

    once, twice = looks(200), looks(400)
    assert once > 200
    assert twice <= 2 * once + 10
