"""The process that starts the ranks, notices their deaths and replaces them. It never trains.

It combines the part that decides (`policy`), the part that has the processes (`node`), and the store in which ranks
leave messages.
"""

import logging
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from lightning_replica.control import departures, keys, planned_save
from lightning_replica.control.departures import has_left
from lightning_replica.control.faults import Fault
from lightning_replica.control.generation import Generations
from lightning_replica.control.phase import Phase, phase_of
from lightning_replica.control.trainer_facts import TrainerFacts
from lightning_replica.core.messages import leave_room
from lightning_replica.core.options import RecoveryOptions
from lightning_replica.core.signals import signal_name
from lightning_replica.devices.exceptions import explain
from lightning_replica.exit_codes import DEVICE_LOST, GASP_WRITTEN
from lightning_replica.launch.ending import Ending
from lightning_replica.launch.exit_report import ExitReport
from lightning_replica.launch.node import Child, Ended, Event, Node, Start
from lightning_replica.launch.node_context import LOOPBACK, NodeContext
from lightning_replica.launch.others import Nobody, Others
from lightning_replica.launch.policy import (
    Action,
    Actions,
    EndAbsent,
    EndRanks,
    Facts,
    GiveUp,
    Policy,
    RankEnd,
    Relocate,
    Replace,
    Say,
    Send,
)
from lightning_replica.launch.rank_logs import RankLogs
from lightning_replica.launch.standby import Standbys
from lightning_replica.stores.interface import Store
from lightning_replica.stores.tcp import connect, serve

log = logging.getLogger(__name__)

# Unless this process was started to ignore them: SIGHUP under nohup, SIGINT in the background of a script.
_HEARD: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, planned_save.SIGNAL)


class Supervisor:
    """Runs N ranks as children, and ends when they have ended.

    Args:
        start: Starts the process of a rank.
        world_size: Number of ranks.
        options: What the user has chosen about recovery, as far as known at the start.
        say: Prints a message for the user.
        directory: Where the stacks of ranks are written when one hangs.
        standbys: Processes that wait to become ranks.
        expects_facts: Whether ranks report further options and the directory (`TrainerFacts`).
        notes: Entries that the supervisor puts into the store for the ranks.
        logs: Files for the ranks' output; None if it goes where this process's goes.
    """

    def __init__(
        self,
        start: Start,
        world_size: int,
        options: RecoveryOptions,
        say: Callable[[str], None],
        directory: Path = Path(),
        standbys: Standbys | None = None,
        expects_facts: bool = False,
        notes: Mapping[str, str] | None = None,
        logs: RankLogs | None = None,
    ) -> None:
        self._world_size, self._say, self._expects_facts, self._notes = world_size, say, expects_facts, notes or {}
        self._node = Node(start, world_size, options, directory, standbys, logs)
        self._policy = Policy(options)
        self._has_failed = False

    def run(self) -> int:
        """Start all ranks, and when they have ended, return the exit code that this process should end with.

        The code is 0 if every rank ended with 0; else one of `exit_codes`, or the code of the rank that failed first
        (128 + n for signal n).
        """
        served = serve(LOOPBACK)
        store = connect(LOOPBACK, served.port)
        for key, note in self._notes.items():
            store.set(key, note)
        context, ranks = NodeContext.alone(self._world_size, served.port), range(self._world_size)
        return self.run_at(context, lambda: connect(LOOPBACK, served.port), ranks, Nobody())

    def run_at(self, context: NodeContext, connect: Callable[[], Store], ranks: Iterable[int], others: Others) -> int:
        """Start some ranks of the world, and return like `run`.

        Args:
            context: Where this supervisor stands.
            connect: Opens a new connection to the store that all processes of the run share.
            ranks: The ranks of this node; none on a spare.
            others: The other nodes.
        """
        self._store, self._others = connect(), others
        self._generations = Generations(self._store)
        self._on_node = context.on_node
        self._node.open(context, connect)
        heard = [each for each in _HEARD if signal.getsignal(each) is not signal.SIG_IGN]
        self._handlers = {s: signal.signal(s, self._on_signal) for s in heard}
        self._hear_usr1()
        asked = ExitStack()
        asked.enter_context(planned_save.listening())
        try:
            self.start(ranks, generation=0)
            self._node.watch_standbys()
            others.begin(self._node.put)
            while self._node.children or not others.may_leave():
                self._handle(self._node.next())
        finally:
            self._node.close()
            asked.close()
            for signum, handler in self._handlers.items():
                signal.signal(signum, handler)
        return self._final_code()

    def start(self, ranks: Iterable[int], generation: int) -> None:
        """Start ranks on this node. Other threads use `Others.begin` to have this called."""
        for rank in ranks:
            self._node.start(rank, generation)

    @property
    def stalls(self) -> bool:
        """Whether all ranks of this node wait for others for too long, as last seen. Any thread may ask."""
        return self._node.stalls

    def called_back(self) -> None:
        """Tell what ranks of this node were doing when all ranks, which waited for each other, were called back."""
        text = self._node.called_back()
        if text:
            self._say(text)

    def release(self, ranks: tuple[int, ...]) -> None:
        """Kill ranks of this node that another one is to run."""
        self._node.dismiss(ranks)

    def node_ended(self, ranks: tuple[int, ...], how: str) -> None:
        """Have the ranks of a lost node replaced, or end the run. See `Policy.node_ended`."""
        self._policy.count(self._others.restarts)
        self._carry_out(self._policy.node_ended(ranks, how, self._facts()))

    def no_node_came(self, ranks: tuple[int, ...], how: str) -> None:
        """End the run: no node has taken the place of a lost one. See `Policy.no_node_came`."""
        self._carry_out(self._policy.no_node_came(ranks, how, self._facts()))

    def store_lost(self, ranks: tuple[int, ...], how: str) -> None:
        """End the run: the store was lost, and ``ranks`` with it, as what only it held is gone."""
        self._carry_out(self._policy.give_up(how, self._facts(), ranks))

    def abandoned(self, how: str) -> None:
        """End the run: no node is left that trains. See `Policy.abandoned`."""
        self._carry_out(self._policy.give_up(how, self._facts()))

    @property
    def patience_s(self) -> float:
        """How long to wait for a node that takes the place of a lost one, in seconds."""
        return self._policy.options.rendezvous_timeout_s

    def kill(self) -> None:
        """Kill all ranks of this node at once. Any thread may call this."""
        self._node.kill_all()

    def _final_code(self) -> int:
        path = self._generations.last_checkpoint() if self._policy.options.gasp else None
        code = self._policy.final_code(saved=path is not None)
        if not self._node.has_had_ranks:  # a spare: the others judge
            return code
        if code == 0 and self._expects_facts:
            self._say(
                "all ranks have ended, and none has called `fit` or another method of the trainer. The script may do so"
                " only on some condition, or in a process that it starts."
            )
        code = Ending(self._store, self._world_size).judge(code, self._facts().in_fit, self._say)
        if path is not None:
            again = " Start it again from there." if code == GASP_WRITTEN else ""
            self._say(f"the run has ended early and has left {path}.{again}")
        return code

    # Events

    def _handle(self, event: Event) -> None:
        """Handle an event. If that fails, end the run as if a rank could not be replaced: healthy ranks can save."""
        is_rank = isinstance(event, Child) and self._node.has(event)
        try:
            self._on(event)
        except Exception as error:
            if self._has_failed:
                raise
            self._has_failed = True
            log.exception("The supervisor has failed.")
            why = f"The supervisor has failed with {explain(error)}; this ends the run."
            self._carry_out(self._policy.give_up(why, self._facts()))
        if is_rank and not self._node.children:
            self._others.ended()

    def _on(self, event: Event) -> None:
        self._read_trainer_facts()
        if event is None:
            self._look()
        elif isinstance(event, Standbys):
            event.fill(self._policy.restarts_left)
        elif event == planned_save.SIGNAL:
            self._on_save_requested()
        elif isinstance(event, signal.Signals):
            self._carry_out(self._policy.signalled(event, time.monotonic(), self._facts()))
        elif isinstance(event, Child):
            if not self._node.has(event):
                return
            ended = self._node.bury(event)
            if not ended.hung and not self._facts().in_fit:  # it may have ended because those are gone
                for child in self._node.killed():
                    self._on_end(self._node.bury(child))
            self._on_end(ended)
        else:
            event()

    def _read_trainer_facts(self) -> None:
        """Take over what the trainer's callbacks say, once a rank has reported it."""
        facts = TrainerFacts.read(self._store) if self._expects_facts else None
        if facts is None:
            return
        self._expects_facts, self._policy.options = False, facts.options
        self._node.use(facts.options, Path(facts.directory))
        self._hear_usr1()
        leave_room(facts.room)

    def _hear_usr1(self) -> None:
        """Handle SIGUSR1 like SIGTERM if there is a last checkpoint to write; else leave its usual effect."""
        if self._policy.options.gasp and signal.SIGUSR1 not in self._handlers:
            self._handlers[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._on_signal)

    def _on_signal(self, signum: int, _: object) -> None:
        self._node.put(signal.Signals(signum))

    def _on_end(self, ended: Ended) -> None:
        facts = self._facts()
        if ended.code == 0 and not facts.in_fit:
            departures.end(self._store, ended.child.rank)
        how = ended.hung or self._why(ended, facts)
        self._policy.count(self._others.restarts)
        end = RankEnd(ended.child.rank, ended.code, how, bool(ended.hung), ended.where, ended.again)
        self._carry_out(self._policy.rank_ended(end, facts))

    def _on_save_requested(self) -> None:
        """Pass the request on to the ranks that listen; one rank that receives it is enough."""
        children = self._node.children.values() if self._facts().in_fit else ()
        listening = [child.rank for child in children if self._listens(child)]
        self._node.send(planned_save.SIGNAL, listening)
        if not listening:
            self._say(
                f"{planned_save.SIGNAL.name}: nothing is saved. Either training is not under way, or it has neither a"
                " CheckpointPublisher nor a DyingGaspCheckpoint, which name the directory."
            )

    def _listens(self, child: Child) -> bool:
        """Return whether this process listens, and not only an earlier process of the same rank."""
        key = keys.listens(child.rank)
        return self._store.check([key]) and int(self._store.get(key)) == child.generation

    def _look(self) -> None:
        """Let the policy act on the time, and kill ranks that hang."""
        if self._policy.keeps_time:  # the facts are in the store, and this is done every second or more often
            self._carry_out(self._policy.time_passes(time.monotonic(), self._facts(), self._node.hanging))
        hang = self._node.look(self._phase)
        if hang is None or not self._policy.watches(self._facts()):
            return
        self._say(hang.text)
        if hang.stalled:
            self._generations.begin_next(0, Fault("hang", (), hang.text))
        for rank, how in hang.culprits.items():
            self._node.kill(rank, how)

    # Facts

    def _phase(self) -> Phase:
        return phase_of(self._store)

    def _facts(self) -> Facts:
        why = self._store.get(keys.NO_REPLACEMENT).decode() if self._store.check([keys.NO_REPLACEMENT]) else ""
        verdict = self._generations.verdict()
        code = 0 if verdict is None else self._generations.exit_code()
        return Facts(self._phase(), given_up=verdict or "", code=code, no_replacement=why)

    def _why(self, ended: Ended, facts: Facts) -> str:
        """Describe how a rank ended, or which other rank caused it: the first seen to end need not be the cause."""
        own, code = ended.child, ended.code
        others = () if facts.in_fit else self._node.children.values()  # in `fit` each fault is handled by itself
        processes = [(child.rank, child.generation) for child in (own, *others)]
        reports = ExitReport.read(self._store, processes) if code > 0 and code != DEVICE_LOST else []
        waited = bool(reports) and not reports[0].own and reports[0].rank == own.rank and reports[0].place
        asked = (rank for rank in range(self._world_size) if waited and rank != own.rank)
        gone = ", ".join(f"rank {rank}" for rank in asked if has_left(self._store, rank))
        if gone:
            together = "all ranks have to make this call, or none"
            return f"Rank {own.rank}{self._on_node} waited at {waited} for {gone}, which had ended ({together})"
        if reports and (reports[0].own or reports[0].rank == own.rank):
            where = f" ({reports[0].place})" if reports[0].place else ""
            return f"Rank {reports[0].rank}{self._on_node} ended with {reports[0].error}{where}"
        return f"Rank {own.rank}{self._on_node} {_how(code)}{ended.crash}"

    # Actions

    def _carry_out(self, actions: Actions) -> None:
        for action in actions:
            self._do(action)

    def _do(self, action: Action) -> None:
        if isinstance(action, Say):
            self._say(action.text)
        elif isinstance(action, Replace):
            self._replace(action)
        elif isinstance(action, Relocate):
            self._relocate(action)
        elif isinstance(action, GiveUp):
            self._generations.end(action.why, action.ranks, action.asked, action.code)
        elif isinstance(action, Send):
            self._node.send(action.signum)
        elif isinstance(action, EndRanks):
            self._node.end(action.signum, action.after_s)
        elif isinstance(action, EndAbsent):
            self._end_absent()

    def _replace(self, action: Replace) -> None:
        generation = self._generations.begin_next(0, action.fault)
        try:
            who = self._node.start(action.rank, generation)
        except Exception as error:  # the machine may lack memory, processes or descriptors
            why = f"{action.fault.text}, and no process can be started in its place: {explain(error)}."
            self._carry_out(self._policy.give_up(why, self._facts(), (action.rank,)))
            return
        used = f"{action.number} of {self._policy.options.max_restarts}"
        self._say(f"{action.fault.text}; {who} takes its place ({used}).")

    def _relocate(self, action: Relocate) -> None:
        who = self._others.relocate(action.fault)
        used = f"({action.number} of {self._policy.options.max_restarts})"
        waits = f"no spare is left; waiting up to {self._others.patience_s:g} s for another node {used}."
        self._say(f"{action.fault.text}; {f'{who} takes its place {used}.' if who else waits}")

    def _end_absent(self) -> None:
        ranks = self._node.children
        absent = [rank for rank in ranks if not self._generations.has_come_to_save(rank)]
        for rank in absent if len(absent) < len(ranks) else ():
            why = f"Rank {rank} was busy and did not join the save; it was killed, and the others continue."
            self._say(why)
            self._node.kill(rank, why)


def _how(code: int) -> str:
    if code < 0:
        return f"died ({signal_name(-code)})"
    return f"ended with exit code {code}" + (" because it lost its device" if code == DEVICE_LOST else "")
