"""The commit rule, the planner and the phases of recovery, explored exhaustively: up to two faults, anywhere.

From every reachable state of the model (world.py), in training or in any phase of a recovery, a rank dies, raises,
finds wrong bits in its shard, or receives what cannot be trusted; or all ranks of a node die together. The others go on
as far as they may and stop anywhere; meanwhile the second fault may come. Then all report, and the plan must bring all
to one step with every shard there, nothing that a live rank saw committed undone, and everyone able to go on. It may
only be refused where all holders of a shard are lost.

Seen to fail: with `min` for `max` in `make_plan`; with the tail always or never chosen in `_kind`; with mirrors taken
for granted there; and with three peers, before a recovery that had given the tail up could go on from a batch that is
not mirrored everywhere (`_kind`). `test_the_rule_is_needed` keeps one such failure.
"""

from collections.abc import Sequence

import pytest

from lightning_replica.core.grid import Grid
from lightning_replica.errors import ProtocolError, RecoveryError
from lightning_replica.recovery.gasp import make_gasp_plan
from lightning_replica.recovery.planner import Plan, make_plan
from tests.recovery.world import (
    PLANNED,
    ROLLING,
    START,
    TAKING,
    UPDATING,
    Rank,
    Rule,
    State,
    T,
    bit,
)

Failed = tuple[tuple[int, str], ...]  # rank, how


class Explorer:
    """Walks through every state.

    Args:
        rule: How ranks move.
        faults: How many come.
        each: Whether every mirror may or may not have arrived; otherwise all or none have.
        hooks: Whether hooks of the user's fail too, in any phase of a recovery.
        bits: Whether bits go wrong too.
        first: Ranks that the first fault may hit. One is enough where all stand alike, and a shard has one giver.
        local: Number of ranks on a node. If there are several, only whole nodes fail.
    """

    def __init__(
        self, rule: Rule, faults: int, each: bool, hooks: bool, bits: bool, first: Sequence[int], local: int = 1
    ) -> None:
        self.rule, self.grid, self.faults, self.first, self.local = rule, rule.grid, faults, first, local
        self.each, self.hooks, self.bits = each, hooks, bits
        self.seen: set[object] = set()
        self.todo: list[tuple[State, Plan | None, Failed, int]] = []
        self.decided: dict[State, Plan | None] = {}
        self.lost = 0

    def run(self) -> None:
        self.push(self.rule.start(), None, (), self.faults)
        while self.todo:
            state, plan, failed, left = self.todo.pop()
            stopped = {rank for rank, _ in failed}
            for rank in range(self.grid.size):
                if rank in stopped:
                    continue
                moved = self.rule.next(state, plan, rank)
                if moved is not None:
                    self.push((*state[:rank], moved, *state[rank + 1 :]), plan, failed, left)
                if left == self.faults and rank not in self.first:
                    continue
                for fault in self.faults_of(rank, state[rank]) if left else ():
                    self.push(state, plan, tuple(sorted((*failed, *fault))), left - 1)
            if failed:
                self.stop(state, plan, failed, left)

    def push(self, state: State, plan: Plan | None, failed: Failed, left: int) -> None:
        if plan is not None and all(own.at >= START for own in state):
            plan = None  # the recovery is over
        key = (state, plan, failed, left)
        if key not in self.seen:
            self.seen.add(key)
            self.todo.append((state, plan, failed, left))

    def faults_of(self, rank: int, own: Rank) -> list[Failed]:
        """What may happen to a rank, or to the node of which it is the first."""
        if self.local == 1:
            return [((rank, how),) for how in self.ways(own)]
        return [] if rank % self.local else [tuple((rank + other, "killed") for other in range(self.local))]

    def ways(self, own: Rank) -> tuple[str, ...]:
        """How it fails; "raised" in a recovery is a shard that keeps arriving damaged, or a hook."""
        raised = ("raised",) if own.at >= START or own.at == TAKING or self.hooks else ()
        corrupted = ("corrupted",) if self.bits and not (own.new or own.torn) else ()
        return ("killed", *raised, *corrupted)

    def stop(self, state: State, plan: Plan | None, failed: Failed, left: int) -> None:
        """Everyone notices and reports. An update waits for nobody: only a failure of its own ends one half-way."""
        stopped = {rank for rank, _ in failed}
        if any(own.at in (UPDATING, ROLLING) for rank, own in enumerate(state) if rank not in stopped):
            return
        for arrived in self.rule.arrivals(state, plan, self.each):
            ranks = list(arrived)
            for rank, how in failed:
                own = ranks[rank]
                raised = how == "raised" and own.at >= START
                corrupted = how == "corrupted"
                hurt = own._replace(raised=raised, corrupted=corrupted, torn=own.torn or corrupted)
                ranks[rank] = self.rule.replacement() if how == "killed" else hurt
            world = tuple(ranks)
            if world not in self.decided:
                self.decided[world] = self.decide(world)
            decided = self.decided[world]
            if decided is not None and left:
                self.push(self.regrouped(world), decided, (), left)

    def regrouped(self, state: State) -> State:
        return tuple(own._replace(at=PLANNED, raised=False) for own in state)

    def decide(self, state: State) -> Plan | None:
        reports = [self.rule.report(state, rank) for rank in range(self.grid.size)]
        lost = any(
            all(state[peer].new or state[peer].torn for peer in self.grid.peers(shard))
            for shard in range(self.grid.shards)
        )
        self.gasp(state, lost)
        if lost or all(own.raised for own in state):
            self.lost += 1
            with pytest.raises(RecoveryError):
                make_plan(reports, self.grid, 3)
            return None
        plan = make_plan(reports, self.grid, 3)
        self.check(state, plan)
        return plan

    def check(self, state: State, plan: Plan) -> None:
        live = [own for own in state if not own.new]
        # Nothing that a live rank saw committed is undone, and nothing is made up.
        assert plan.step == T + max(own.known for own in live)
        # And no tail is done again for nothing: only where a survivor could not be made anew at the batch's start.
        batch = bit("batch", plan.step - T)
        mirrored = all(
            state[peer].mirrors[self.rule.replica[rank]] & batch
            for rank in range(self.grid.size)
            for peer in self.rule.peers[rank]
        )
        if mirrored and not any(own.new or own.corrupted for own in state) and all(own.held & batch for own in state):
            assert plan.kind == "batch"
        # Without a further fault all come through, to that step and back to where they can be helped again.
        end = self.finish(self.regrouped(state), plan)
        goal = bit(plan.kind, plan.step - T)
        for rank, own in enumerate(end):
            assert (own.at, own.step, own.known) == (START, plan.step - T, plan.step - T)
            assert own.held == goal
            assert own.written == (plan.kind == "batch")
            assert all(own.mirrors[self.rule.replica[peer]] == goal for peer in self.rule.peers[rank])
            assert (own.torn, own.new, own.entered) == (False, False, False)

    def gasp(self, state: State, lost: bool) -> None:
        """Should the run be given up here, those who are left write all of it; new processes have nothing to add."""
        left = [self.rule.report(state, rank) for rank, own in enumerate(state) if not own.new]
        if lost:
            with pytest.raises(RecoveryError):
                make_gasp_plan(left, self.grid)
            return
        plan = make_gasp_plan(left, self.grid)
        assert plan.step == T + max(own.known for own in state if not own.new)
        here = bit(plan.kind, plan.step - T)
        everyone = list(range(self.grid.size))
        for given in (plan.pieces, plan.privates):
            assert set(given) == set(plan.ranks)
            assert sorted(rank for ranks in given.values() for rank in ranks) == everyone
        for writer, ranks in plan.pieces.items():
            assert state[writer].held & here
            assert all(writer in self.grid.peers(rank) for rank in ranks)
            if ranks:
                assert not state[writer].torn
                assert state[writer].step == plan.step - T or writer in plan.forward
        for giver, ranks in plan.privates.items():
            mirrors = state[giver].mirrors
            assert all(giver == rank or mirrors[self.rule.replica[rank]] & here for rank in ranks)

    def finish(self, state: State, plan: Plan) -> State:
        while any(own.at != START for own in state):
            moved = [None if own.at == START else self.rule.next(state, plan, rank) for rank, own in enumerate(state)]
            rank, after = next((rank, own) for rank, own in enumerate(moved) if own is not None)
            own = state[rank]
            # Whoever rolls forward has its gradient; whoever starts again has the snapshot; who gives has arrived.
            if own.at == PLANNED and rank in plan.forward:
                assert own.entered
                assert not own.torn
                assert plan.commit == (float(plan.step),)
            if own.at == TAKING:
                move = next(move for move in plan.moves if move.target == rank)
                source = state[move.source]
                assert source.step == plan.step - T
                assert (source.torn, source.new) == (False, False)
                if move.host:
                    assert source.held & bit(plan.kind, source.step)
                    assert source.mirrors[self.rule.replica[rank]] & bit(plan.kind, source.step)
            if own.at == PLANNED and not own.new:
                assert own.held & bit(plan.kind, plan.step - T)
            state = (*state[:rank], after, *state[rank + 1 :])
        return state


@pytest.mark.parametrize(
    ("world_size", "replicas", "faults", "each", "hooks", "bits", "first"),
    [
        (2, 2, 2, True, True, True, [0, 1]),
        (3, 3, 1, True, True, True, [0, 1, 2]),
        pytest.param(3, 3, 2, False, False, True, [0, 1, 2], marks=pytest.mark.combinations),
        (4, 2, 1, True, True, True, [0]),
        pytest.param(4, 2, 2, False, False, False, [0], marks=pytest.mark.combinations),
        (4, 4, 1, False, True, True, [0, 1, 2, 3]),
    ],
)
def test_faults_anywhere(
    world_size: int, replicas: int, faults: int, each: bool, hooks: bool, bits: bool, first: list[int]
) -> None:
    explorer = Explorer(Rule(Grid.of(world_size, replicas)), faults, each, hooks, bits, first)
    explorer.run()
    assert len(explorer.decided) > 100
    assert (explorer.lost > 0) == (faults >= replicas)


@pytest.mark.parametrize(
    ("world_size", "replicas", "local", "faults", "survives"),
    [
        (4, 2, 2, 1, True),  # each node has a replica
        (4, 2, 2, 2, False),
        (4, 4, 2, 1, True),
        pytest.param(4, 4, 2, 2, False, marks=pytest.mark.combinations),
        pytest.param(6, 2, 2, 1, True, marks=pytest.mark.combinations),  # each replica is on one node and a half
        pytest.param(6, 3, 2, 1, True, marks=pytest.mark.combinations),
    ],
)
def test_nodes_that_fail_anywhere(world_size: int, replicas: int, local: int, faults: int, survives: bool) -> None:
    ranks = range(world_size)
    explorer = Explorer(Rule(Grid.of(world_size, replicas)), faults, False, False, False, ranks, local)
    explorer.run()
    assert len(explorer.decided) > 100
    assert (explorer.lost == 0) == survives


@pytest.mark.combinations
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("world_size", "replicas"), [(3, 3), (4, 2)])
def test_two_faults_with_every_order_of_messages(world_size: int, replicas: int) -> None:
    first = [0] if replicas == 2 else range(world_size)
    Explorer(Rule(Grid.of(world_size, replicas)), 2, True, True, True, first).run()


def test_the_rule_is_needed() -> None:
    """If a commit could succeed before everyone has a complete gradient, some fault could not be repaired."""
    explorer = Explorer(Rule(Grid.of(2, 2), enter_when_reduced=False), 1, True, True, False, [0, 1])
    with pytest.raises((AssertionError, ProtocolError, RecoveryError)):
        explorer.run()
