"""The supervisor's decisions: each transition, and what holds whatever happens in whatever order. No process."""

import itertools
import signal
from typing import Any

import pytest

from lightning_replica.control.faults import Fault
from lightning_replica.control.phase import Phase
from lightning_replica.core.options import RecoveryOptions
from lightning_replica.exit_codes import GASP_WRITTEN, GAVE_UP, NOTHING_SAVED
from lightning_replica.launch.policy import (
    END_EARLY_S,
    END_S,
    Action,
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
    State,
)

FIT, DONE, SET_UP = Facts("fit"), Facts("done"), Facts("set-up")
DIED = RankEnd(1, -9, "Rank 1 died (SIGKILL)")


def policy(**options: Any) -> Policy:
    return Policy(RecoveryOptions(**options))


def given_up(why: str, ranks: tuple[int, ...] = (), asked: bool = False, code: int = GAVE_UP) -> tuple[Action, ...]:
    return (Say(why), GiveUp(why, ranks, asked, code))


def test_what_has_ended_on_another_node_gives_the_exit_code() -> None:
    """Whether this node sees its own ranks end first, or the other node."""
    facts = Facts("set-up", "Rank 0 on node a ended with ValueError: no data.", 1)
    ends = EndRanks(signal.SIGTERM, END_EARLY_S)
    said = Say("The run has ended because of another node. Rank 0 on node a ended with ValueError: no data.")
    run = policy()
    assert run.node_ended((0,), "Node a is lost", facts) == (said, GiveUp("Node a is lost", code=1), ends)
    assert run.rank_ended(DIED, facts) == (GiveUp(DIED.how, code=1), ends)
    assert run.final_code(saved=False) == 1


def test_a_rank_that_gives_up_the_run_says_so_itself() -> None:
    run = policy()
    facts = Facts("fit", "Every rank is lost.")
    ended = RankEnd(0, 1, "Rank 0 ended with RecoveryError")
    assert run.rank_ended(ended, facts) == (GiveUp(ended.how, code=1), EndRanks(signal.SIGTERM, END_S))


def test_a_lost_rank_is_replaced_as_often_as_the_user_says() -> None:
    run = policy(max_restarts=2)
    assert run.rank_ended(DIED, FIT) == (Replace(1, Fault("death", (1,), DIED.how), 1),)
    hung = RankEnd(0, -9, "Rank 0 hangs", hung=True)
    assert run.rank_ended(hung, FIT) == (Replace(0, Fault("hang", (0,), hung.how), 2),)
    why = "Rank 1 died (SIGKILL), and no replacement is left: 2 of max_restarts=2 are used."
    assert run.rank_ended(DIED, FIT) == (*given_up(why, (1,)), EndRanks(signal.SIGTERM, END_S))
    assert (run.state, run.final_code(saved=False)) == (State.ENDING, GAVE_UP)


def test_the_ranks_of_a_lost_node_go_to_another_which_counts_once() -> None:
    run, how = policy(max_restarts=1), "Node a, with ranks [2, 3], is lost"
    assert run.node_ended((2, 3), how, FIT) == (Relocate(Fault("death", (2, 3), how), 1),)
    assert (run.state, run.restarts_left) == (State.RUNNING, 0)
    why = f"{how}, and no replacement is left: 1 of max_restarts=1 are used."
    ending = EndRanks(signal.SIGTERM, END_S)
    assert run.node_ended((2, 3), how, FIT) == (*given_up(why, (2, 3)), ending)
    assert run.final_code(saved=False) == GAVE_UP


def test_replacements_of_other_supervisors_count() -> None:
    run = policy(max_restarts=3)
    run.count(2)
    assert run.node_ended((2,), "Node a is lost", FIT) == (Relocate(Fault("death", (2,), "Node a is lost"), 3),)
    run.count(2)  # the log may be behind this supervisor's own decision
    assert run.restarts_left == 0


@pytest.mark.parametrize(
    ("facts", "options", "why"),
    [
        (FIT, {"recovery": False}, ". With recovery=False, this ends the run."),
        (SET_UP, {}, " before its first batch, where a node cannot be replaced."),
        (DONE, {}, " outside of training, where a node cannot be replaced."),
        (Facts("fit", no_replacement="x."), {}, ", and it cannot be replaced: x."),
    ],
)
def test_the_ranks_of_a_lost_node_cannot_go_anywhere(facts: Facts, options: dict[str, Any], why: str) -> None:
    run = policy(**options)
    said, gives_up, *_ = run.node_ended((2,), "Node a is lost", facts)
    assert said == Say(f"Node a is lost{why}")
    assert isinstance(gives_up, GiveUp)
    assert run.code == GAVE_UP


def test_no_node_comes() -> None:
    run = policy(gasp=True, rendezvous_timeout_s=5.0)
    why = "Node a is lost, and no other node has come within 5 s (rendezvous_timeout_s)."
    assert run.no_node_came((2, 3), "Node a is lost", FIT) == given_up(why, (2, 3))
    assert (run.state, run.final_code(saved=True)) == (State.SAVING, GASP_WRITTEN)


@pytest.mark.parametrize(
    ("end", "facts", "options", "why", "code"),
    [
        (DIED, SET_UP, {}, "Rank 1 died (SIGKILL) before its first batch, where a rank cannot be replaced.", 137),
        (DIED, DONE, {}, "Rank 1 died (SIGKILL) outside of training, where a rank cannot be replaced.", 137),
        (DIED, FIT, {"recovery": False}, "Rank 1 died (SIGKILL). With recovery=False, this ends the run.", 137),
        (
            RankEnd(1, 3, "Rank 1 ended with exit code 3", where="in forward of step 4", again=True),
            FIT,
            {},
            "Rank 1 ended with exit code 3, twice in forward of step 4: another process would end there too.",
            3,
        ),
        (
            DIED,
            Facts("fit", no_replacement="It has trained before."),
            {},
            "Rank 1 died (SIGKILL), and it cannot be replaced: It has trained before.",
            GAVE_UP,
        ),
        (RankEnd(1, -9, "Rank 1 hangs", hung=True), DONE, {}, None, GAVE_UP),
    ],
)
def test_where_it_cannot_be_the_run_is_given_up(
    end: RankEnd, facts: Facts, options: dict[str, Any], why: str | None, code: int
) -> None:
    run = policy(**options)
    said, given, *_, ends = run.rank_ended(end, facts)
    assert why is None or said == Say(why)
    assert isinstance(given, GiveUp)
    assert isinstance(ends, EndRanks)
    assert ends.after_s == (END_EARLY_S if facts.phase == "set-up" else END_S)
    assert run.final_code(saved=False) == code


def test_who_has_come_to_the_end_ends() -> None:
    assert policy().rank_ended(RankEnd(0, 0, "Rank 0 ended with exit code 0"), DONE) == ()


def test_ranks_that_are_left_may_save() -> None:
    run = policy(gasp=True, max_restarts=0)
    why = "Rank 1 died (SIGKILL), and no replacement is left: 0 of max_restarts=0 are used."
    assert run.rank_ended(DIED, FIT) == given_up(why, (1,))  # nobody is ended: they write
    assert run.state is State.SAVING
    assert run.watches(Facts("fit", given_up="It is over."))
    lost_too = RankEnd(2, 1, "Rank 2 ended with exit code 1")
    assert run.rank_ended(lost_too, Facts("fit", given_up="It is over.")) == (GiveUp(lost_too.how, (2,), code=GAVE_UP),)
    assert (run.final_code(saved=True), run.final_code(saved=False)) == (GASP_WRITTEN, NOTHING_SAVED)


def test_a_signal_gives_ranks_the_grace() -> None:
    run, given_up = policy(gasp=True, grace_s=30.0), Facts("fit", given_up="It is over.")
    assert not run.keeps_time
    said, sent = run.signalled(signal.SIGTERM, 100.0, FIT)
    assert said == Say("SIGTERM: all ranks save and end, within 30 s.")
    assert sent == Send(signal.SIGTERM)
    assert run.state is State.STOPPING
    assert run.keeps_time
    assert run.time_passes(114.9, FIT, hanging=False) == ()
    why = "The run was stopped by SIGTERM."
    assert run.time_passes(115.1, FIT, hanging=False) == (Say(why), GiveUp(why, (), asked=True, code=143))
    assert run.state is State.SAVING
    assert run.time_passes(119.9, given_up, hanging=False) == ()
    assert run.time_passes(120.1, given_up, hanging=True) == ()
    assert run.time_passes(120.1, given_up, hanging=False) == (EndAbsent(),)
    over, killed = run.time_passes(130.1, given_up, hanging=False)
    assert over == Say("30 s are over (grace_s); processes that have not ended are killed.")
    assert killed == EndRanks(signal.SIGKILL)
    assert run.state is State.KILLED
    assert run.time_passes(140.0, given_up, hanging=False) == ()  # said once
    assert run.final_code(saved=False) == NOTHING_SAVED


def test_ranks_ignore_what_a_closed_terminal_sends() -> None:
    """So they are told otherwise."""
    actions = Policy(RecoveryOptions()).signalled(signal.SIGHUP, 0.0, Facts("fit"))
    assert Send(signal.SIGTERM) in actions


def test_a_second_signal_ends_ranks_at_once() -> None:
    run = policy(gasp=True)
    run.signalled(signal.SIGTERM, 0.0, FIT)
    *_, last = run.signalled(signal.SIGINT, 0.1, FIT)
    assert last == EndRanks(signal.SIGKILL)
    assert (run.state, run.final_code(saved=False)) == (State.KILLED, 130)


def test_a_copy_of_a_signal_is_no_second_one() -> None:
    """A terminal that closes, and its shell; a service manager; a wrapper that passes on what the terminal has sent."""
    run = policy(gasp=True)
    run.signalled(signal.SIGTERM, 0.0, FIT)
    assert run.signalled(signal.SIGTERM, 0.9, FIT) == ()
    assert run.signalled(signal.SIGHUP, 5.0, FIT) == ()
    assert run.state is State.STOPPING
    run = policy(gasp=True)
    run.signalled(signal.SIGHUP, 0.0, FIT)
    assert run.signalled(signal.SIGTERM, 0.9, FIT) == ()
    *_, last = run.signalled(signal.SIGTERM, 1.1, FIT)
    assert last == EndRanks(signal.SIGKILL)


@pytest.mark.parametrize(("options", "facts"), [({}, FIT), ({"gasp": True}, SET_UP), ({"gasp": True}, DONE)])
def test_where_nothing_can_be_saved_a_signal_is_passed_on(options: dict[str, Any], facts: Facts) -> None:
    run = policy(**options)
    why, after_s = "The run was stopped by SIGINT.", END_EARLY_S if facts is SET_UP else END_S
    ends = (Send(signal.SIGINT), EndRanks(signal.SIGTERM, after_s))
    assert run.signalled(signal.SIGINT, 0.0, facts) == (*given_up(why, asked=True, code=130), *ends)
    assert run.final_code(saved=False) == 130


def test_whatever_happens_in_whatever_order() -> None:
    """Every order of four events, in every phase, with and without a last checkpoint."""
    events = ("death", "exit", "clean end", "signal", "half", "over")
    phases: tuple[Phase, ...] = ("set-up", "fit", "done")
    for phase, gasp, order in itertools.product(phases, (False, True), itertools.product(events, repeat=4)):
        run, now, ever_given_up, code = policy(gasp=gasp, max_restarts=1, grace_s=10.0), 0.0, False, 0
        for event in order:
            facts = Facts(phase, "It is over." if ever_given_up else "")
            if event in ("half", "over"):
                now += 6.0 if event == "half" else 11.0
                actions = run.time_passes(now, facts, hanging=False)
            elif event == "signal":
                actions = run.signalled(signal.SIGTERM, now, facts)
            else:
                ended = RankEnd(0, {"death": -9, "exit": 3, "clean end": 0}[event], "Rank 0 ended")
                actions = run.rank_ended(ended, facts)
            replaced = [action for action in actions if isinstance(action, Replace)]
            assert not (replaced and (ever_given_up or phase != "fit"))
            assert run.restarts <= 1
            ever_given_up |= any(isinstance(action, GiveUp) for action in actions)
            if run.state is not State.KILLED:
                assert ever_given_up == (run.code != 0)  # where a run fails ranks are told, and nowhere else
            assert code in (0, run.code) or run.state is State.KILLED  # the first failure names the exit code
            code = run.code
            if run.state is State.SAVING:
                assert gasp
                assert phase == "fit"
            if run.state is State.ENDING and actions:
                assert any(isinstance(action, EndRanks) for action in actions)
