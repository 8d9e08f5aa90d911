"""The plan of a recovery, made from the ranks' reports by a pure function: no I/O, no clock, equal on every rank."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_replica.core.grid import Table
from lightning_replica.core.recoverable import Kind
from lightning_replica.errors import ProtocolError, RecoveryError
from lightning_replica.groups.names import Held


@dataclass(frozen=True)
class Mirror:
    """A peer's private state that a rank holds."""

    rank: int
    kind: Kind
    step: int


@dataclass(frozen=True)
class Report:
    """What one rank reports when the world has stopped.

    Attributes:
        rank: The rank that reports.
        step: Updates applied to its shard; -1 for a replacement, which has nothing.
        intact: Whether its shard is whole at ``step``.
        entered: Whether its gradient of the next step is complete.
        committed: The newest committed step that this rank has learned of. Its vector is in ``commit``.
        commit: The commit vector of that step; empty if there is none.
        batch: Steps of its snapshots at the start of a batch window.
        tail: Steps of its snapshots in the tail.
        mirrors: Private states of peers that it holds.
        tries: Recoveries at this step so far.
        raised: The rank's own exception that stopped it; empty if other ranks stopped it.
        device: The error of its device that stopped it; empty if none did.
        damaged_from: Ranks whose data has arrived damaged at this rank in this recovery.
        is_replacement: Whether it is a new process in its first recovery. It may have received its state by now.
        hook: The recovery hook that failed last on this rank in this recovery, and its error.
        hook_failures: How often hooks have failed on this rank in this recovery.
        corrupted: How its shard was found to be wrong, in which case it is not ``intact``; empty if it was not.
        corruption_seen: Whether any rank, even one that is gone by now, has found wrong bits since this rank last
            trained. Known when all have reported (`conclusion.read_reports`).
        left: The generation in which this rank last trained.
        links: For every process group, whether its device has connections that could resume.
        resumed: The step at which they last resumed; -1 if they never did.
        settings: What it trains with, by name, as short text; empty if `settings_step` is -1.
        settings_step: The step of the tail at which it trained with these settings; -1 if it reports none.
        groups: The process groups that its user code holds. The plan does not depend on them; see user_groups.py.
    """

    rank: int
    step: int
    intact: bool
    entered: bool
    committed: int
    commit: tuple[float, ...]
    batch: tuple[int, ...]
    tail: tuple[int, ...]
    mirrors: tuple[Mirror, ...] = ()
    tries: int = 0
    raised: str = ""
    damaged_from: tuple[int, ...] = ()
    is_replacement: bool = False
    hook: str = ""
    hook_failures: int = 0
    corrupted: str = ""
    corruption_seen: bool = False
    left: int = 0
    device: str = ""
    links: tuple[bool, ...] = ()
    resumed: int = -1
    settings: tuple[tuple[str, str], ...] = ()
    settings_step: int = -1
    groups: Held = Held()

    @classmethod
    def of_nothing(cls, rank: int) -> "Report":
        """Return the report of a replacement that has nothing yet, or of a rank that is gone."""
        return cls(rank, -1, False, False, -1, (), (), (), is_replacement=True)

    @property
    def is_empty(self) -> bool:
        """Whether the rank is a replacement that has nothing yet."""
        return self.step < 0

    def holds(self, kind: Kind, step: int) -> bool:
        """Return whether the rank can restore its own snapshot of ``kind`` at ``step``."""
        return step in (self.batch if kind == "batch" else self.tail)

    def to_plain(self) -> dict[str, Any]:
        """Return the report as plain data for JSON, which keeps every bit of a float."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "Report":
        """Return the report that `to_plain` has turned into ``plain``."""
        mirrors = tuple(Mirror(**mirror) for mirror in plain["mirrors"])
        steps = {name: tuple(plain[name]) for name in ("commit", "batch", "tail", "damaged_from", "links")}
        groups = Held(**{name: tuple(keys) for name, keys in plain["groups"].items()})
        settings = tuple((name, value) for name, value in plain["settings"])
        return cls(**{**plain, **steps, "mirrors": mirrors, "groups": groups, "settings": settings})


@dataclass(frozen=True)
class Move:
    """One transfer: ``source`` sends its shard to ``target``, and its host state too if ``host`` is true."""

    source: int
    target: int
    host: bool


@dataclass(frozen=True)
class Decision:
    """The point at which all ranks resume.

    Attributes:
        step: The step at which all ranks end the recovery.
        kind: The kind of snapshot from which training resumes.
        commit: Commit vector for the ranks that roll forward.
        forward: Ranks that make the update of ``step - 1 -> step`` now.
    """

    step: int
    kind: Kind
    commit: tuple[float, ...]
    forward: tuple[int, ...]


@dataclass(frozen=True)
class Plan(Decision):
    """What every rank does in a recovery.

    Attributes:
        moves: Shards that are sent, after any rolling forward.
        resume: Whether devices continue with the connections that they have.
    """

    moves: tuple[Move, ...]
    resume: bool = False

    def to_plain(self) -> dict[str, Any]:
        """Return the plan as plain data for JSON, which keeps every bit of a float."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "Plan":
        """Return the plan that `to_plain` has turned into ``plain``."""
        moves = tuple(Move(**move) for move in plain["moves"])
        return cls(**{**plain, "commit": tuple(plain["commit"]), "forward": tuple(plain["forward"]), "moves": moves})


def make_plan(reports: Sequence[Report], table: Table, max_tries: int) -> Plan:
    """Decide the step, who rolls forward, who sends what to whom, and where training resumes.

    The commit rule (docs/life_of_a_step.md): if any live rank saw a commit succeed, all ranks end behind it, because
    every rank that took part in it has a complete gradient. Otherwise all ranks stay before it, because no live rank
    has changed anything.

    Args:
        reports: One report of every rank, in order of rank.
        table: Which rank owns which shard.
        max_tries: Recoveries at the same step before the run is given up.

    Raises:
        RecoveryError: If the run cannot continue: all holders of a shard are lost, state that a rank needs was not
            mirrored, every rank raised, or a recovery hook or the same step has failed too often.
        ProtocolError: If the reports contradict the commit rule.
    """
    _check_hope(reports, table, max_tries)
    decision = decide(reports, table)
    step, kind = decision.step, decision.kind
    stuck = [report.rank for report in reports if not report.is_empty and not report.holds(kind, step)]
    if stuck:
        raise RecoveryError(
            f"Ranks {stuck} hold no snapshot of the tail of step {step}, and the state of a lost rank at the start of"
            " the next batch was not mirrored yet: a second fault struck before the first was repaired."
        )
    moves = _moves(reports, table, kind, step)
    return Plan(step, kind, decision.commit, decision.forward, moves, _can_resume(reports, step))


def decide(reports: Sequence[Report], table: Table) -> Decision:
    """Apply the commit rule: decide the step, and where in it training resumes. See `make_plan`.

    Raises:
        RecoveryError: If all holders of a shard are lost.
        ProtocolError: If the reports contradict the commit rule.
    """
    newest = max(reports, key=lambda report: report.committed)
    step, forward = newest.committed, []
    for report in reports:
        if not report.intact:
            _check_holders(reports, table, report.rank, step)
        elif report.step == step - 1 and report.entered:
            forward.append(report.rank)
        elif report.step != step:
            raise ProtocolError(f"Step {step} is committed, but {report} is neither there nor one step before it.")
    return Decision(step, _kind(reports, table, step), newest.commit, tuple(forward))


def _can_resume(reports: Sequence[Report], step: int) -> bool:
    """Return whether devices continue with their connections.

    All devices must have the same ones: a rank that lacks a connection would wait for the others to make it, and they
    would not. If connections have already resumed once at this step, they may be the cause of the new fault.
    """
    links = reports[0].links
    return any(links) and all(
        report.links == links and report.resumed != step and not report.is_replacement for report in reports
    )


def _check_hope(reports: Sequence[Report], table: Table, max_tries: int) -> None:
    if all(report.is_empty for report in reports):
        raise RecoveryError("Every rank is lost; no rank holds the state any more.")
    step = max(report.step for report in reports)
    if all(report.raised for report in reports):
        held = {table.shard_of(report.rank) for report in reports if report.intact}
        lost = [table.shard_name(shard) for shard in range(table.shards) if shard not in held]
        shards = f"Shards {', '.join(lost)} were being updated, and are" if lost else "No shard is"
        raise RecoveryError(
            "Every rank raised an exception in the same step, so retrying would not help."
            f" {shards} lost at step {step}. Rank 0: {reports[0].raised}"
        )
    hooks = [report for report in reports if report.hook_failures >= max_tries]
    if hooks:
        said = "; ".join(f"rank {report.rank}: {report.hook}" for report in hooks)
        raise RecoveryError(
            f"A recovery hook has failed {hooks[0].hook_failures} times (max_tries={max_tries}) at step {step}. {said}"
        )
    tries = max(report.tries for report in reports)
    if tries >= max_tries:
        complaints = [(report.rank, report.raised or report.device or report.corrupted) for report in reports]
        said = "; ".join(f"rank {rank}: {text}" for rank, text in complaints if text)
        raise RecoveryError(
            f"The same step has failed {tries + 1} times (max_tries={max_tries}): the one after step {step}."
            f" No shard of step {step} is lost. {said or 'No rank raised.'}"
            " Look for a batch that cannot be trained on, or raise `max_tries`."
        )


def _check_holders(reports: Sequence[Report], table: Table, rank: int, step: int) -> None:
    """Raise an error if no rank is left that can give ``rank`` its shard."""
    peers, shard = table.peers(rank), table.shard_name(table.shard_of(rank))
    if any(reports[peer].intact for peer in peers):
        return
    names = ", ".join(map(str, peers))
    found = [reports[peer].corrupted for peer in peers if reports[peer].corrupted]
    if found:
        raise RecoveryError(
            f"Shard {shard} is lost at step {step}: none of its holders (ranks {names}) can be trusted."
            f" {'. '.join(found)}. Resume from the last checkpoint."
        )
    raise RecoveryError(
        f"Every holder of shard {shard} is lost (ranks {names}) at step {step}."
        f" With replicas={table.replicas}, {table.replicas - 1} of them may be lost at a time."
    )


def _kind(reports: Sequence[Report], table: Table, step: int) -> Kind:
    """Return "batch" if every rank can start its window again; otherwise "tail", that of the step before.

    A survivor's own snapshot is not enough; its peers must hold its private part too. Otherwise the survivor may be
    lost before it has mirrored that part again, when all others have already left the tail behind. In the tail, peers
    hold the private part of every rank. But if a recovery that was cut short has already given up the tail, the
    survivor's own snapshot must suffice. With a corrupted shard, the tail is preferred if it is available: parameters
    made of wrong bits may have entered the batch, and the state of hooks that were called between tail and batch.
    """
    tail, batch = (_can_start(reports, table, kind, step) for kind in ("tail", "batch"))
    if tail and any(report.corrupted or report.corruption_seen for report in reports):
        return "tail"
    if batch and _is_safe(reports, table, step):
        return "batch"
    return "tail" if tail or not batch else "batch"


def _can_start(reports: Sequence[Report], table: Table, kind: Kind, step: int) -> bool:
    """Return whether every survivor has its snapshot, and every replacement has a peer that can send it one."""
    return all(
        _holds_mirror(reports, table, report.rank, kind, step) if report.is_empty else report.holds(kind, step)
        for report in reports
    )


def _is_safe(reports: Sequence[Report], table: Table, step: int) -> bool:
    """Return whether every rank, if it were lost, could be restored at the start of its window."""
    return table.replicas == 1 or all(_is_mirrored(reports, table, report.rank, "batch", step) for report in reports)


def _is_mirrored(reports: Sequence[Report], table: Table, rank: int, kind: Kind, step: int) -> bool:
    """Return whether every peer with an intact shard could restore ``rank``, if that were lost.

    One such peer is not enough, because it may be the next to be lost. If all peers of a survivor are lost or corrupted
    themselves, none could restore it in any case, and the result is true.
    """
    peers = [peer for peer in table.peers(rank) if peer != rank and reports[peer].intact]
    return all(can_send(reports[peer], rank, kind, step) for peer in peers) if peers else not reports[rank].is_empty


def _holds_mirror(reports: Sequence[Report], table: Table, rank: int, kind: Kind, step: int) -> bool:
    return any(can_send(reports[peer], rank, kind, step) for peer in table.peers(rank))


def can_send(source: Report, target: int, kind: Kind, step: int) -> bool:
    """Return whether ``source`` could restore a lost ``target`` at that snapshot."""
    if not (source.intact and source.holds(kind, step)):
        return False
    # A loop that compares field by field: making a `Mirror` and looking it up takes 0.3 s more for 100 000 ranks.
    for held in source.mirrors:  # noqa: SIM110
        if held.rank == target and held.step == step and held.kind == kind:
            return True
    return False


def _moves(reports: Sequence[Report], table: Table, kind: Kind, step: int) -> tuple[Move, ...]:
    load = dict.fromkeys(range(table.size), 0)
    moves = []
    for report in reports:
        if report.intact:
            continue
        sources = [peer for peer in table.peers(report.rank) if reports[peer].intact]
        if report.is_empty:
            sources = [peer for peer in sources if can_send(reports[peer], report.rank, kind, step)]
        if not sources:
            raise RecoveryError(
                f"No peer of rank {report.rank} holds its random state at step {step}: the state was lost before it"
                " could be mirrored again."
            )
        # Prefer peers whose data did not arrive damaged; among them, the one that has the least to send.
        source = min(sources, key=lambda rank: (rank in report.damaged_from, load[rank]))
        load[source] += 1
        moves.append(Move(source, report.rank, report.is_empty))
    return tuple(moves)
