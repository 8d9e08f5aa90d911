"""The table of all keys of the store that the processes of a run share: what a value is, and who writes it.

The supervisor serves the store; without a supervisor, the launcher's own store is used. The value of a key never
changes unless the table says so. So a process that comes late reads what the others have read.
"""

# Keys of the run

JOB = "job"
"""A random number that identifies this run. Written once, by the rank that comes first."""

PHASE = "phase"
"""The value "fit" while a lost rank can be replaced, then "done". Written by every rank when all have met; changes.

On several nodes it is "set-up" before; written by the nodes."""

OPTIONS = "options"
"""What ranks report to the supervisor (`trainer_facts`). Written once, by the first rank in `fit`."""

VERDICT = "verdict"
"""Why the run is given up. Written once, by the rank or the supervisor that gives it up.

Copied to the stores of nodes."""

ASKED = "asked"
"""Present if the run was asked to end, by a signal. Written before `VERDICT`."""

EXIT_CODE = "exit_code"
"""The exit code of what ended the run. Written once, before `VERDICT`, by the supervisor that gives it up."""

NO_REPLACEMENT = "no_replacement"
"""Why a rank that is lost from now on cannot be replaced. Written by any rank."""

LEFT = "left"
"""How many ranks have left a run without supervisor. A counter: the rank that serves the store waits for all."""

LOOP = "loop"
"""The number of the newest training loop. Written by every rank when it begins; changes."""


# Keys of a generation


def generation(number: int) -> str:
    """Return the key of the fault that began a generation. Written once, by compare-and-set; a loser just joins it.

    Where a node was lost, the new placement of nodes is with the fault. Copied to the stores of nodes, without it.
    """
    return f"generation/{number}"


def begins(number: int) -> str:
    """Return the key of the process that begins a generation for all ranks of its node.

    In the store of the node. Written once, by compare-and-set.
    """
    return f"begins/{number}"


def corruption(number: int) -> str:
    """Return the key that is present if a shard was wrong when the generation began. Written by the shard's rank."""
    return f"corruption/{number}"


SAVING_FORBIDDEN = "saving_forbidden"
"""Present once no rank's shard can be trusted any more. Written by the rank that finds this out."""


def share(topic: str, rank: int) -> str:
    """Return the key of what a rank gives to a topic, as JSON. Written by that rank; on several nodes, in its node."""
    return f"{topic}/{rank}"


def posted(topic: str, slot: int) -> str:
    """Return the key of the parts of all ranks of a slot under a topic, as a JSON list (`gathering`).

    Without several nodes, a slot is a rank. Written once, by the last of these ranks.
    """
    return f"{topic}/posted/{slot}"


def come(topic: str) -> str:
    """Return the key of how many slots have posted their parts under a topic. A counter."""
    return f"{topic}/come"


def come_here(topic: str, slot: int) -> str:
    """Return the key of how many ranks of a slot have given their parts. A counter, in the store of the node."""
    return f"{topic}/come/{slot}"


def result(topic: str) -> str:
    """Return the key of what a topic has led to, as JSON (`gathering`).

    Written once, by the last rank that posts or the first that is called away. Copied to the stores of nodes.
    """
    return f"{topic}/result"


def present(topic: str) -> str:
    """Return the key of the ranks that take part in a topic, where no process knows which ranks are left.

    Written once, by the first rank to decide.
    """
    return f"{topic}/ranks"


def facts(topic: str) -> str:
    """Return the topic of what all ranks must have in common before they train (`agreement`)."""
    return f"facts/{topic}"


WORLD = "world"
"""What ranks compare when they start: versions and options. A topic of `facts`."""


def model(fit: int) -> str:
    """Return what ranks compare before a fit: the parameters of their models. A topic of `facts`."""
    return f"model/{fit}"


def directory(fit: int, number: int) -> str:
    """Return where ranks say whether they see a directory of checkpoints, one of a fit's. A topic of `facts`."""
    return f"directory/{fit}/{number}"


def report(number: int) -> str:
    """Return the topic of the reports from which the plan of a recovery is made, in a generation."""
    return f"report/{number}"


def meet(name: str, number: int) -> str:
    """Return the topic of a meeting in a generation: all ranks wait until all have come."""
    return f"meet/{name}/{number}"


def armed(loop: int) -> str:
    """Return the name of the meeting after which a lost rank can be replaced, in a training loop."""
    return f"armed/{loop}"


def finished(loop: int) -> str:
    """Return the name of the meeting at the end of a training loop."""
    return f"finished/{loop}"


SAVED = "gasp/done"
"""The name of the meeting at which the last checkpoint is published."""


def group(name: str) -> str:
    """Return the prefix of the keys that torch writes while a process group is opened."""
    return f"groups/{name}"


def opening(name: str) -> str:
    """Return the topic of a process group whose members are about to open it."""
    return f"opening/{name}"


def barrier(number: int, use: int) -> str:
    """Return the topic of the ``use``-th task that ranks do beside training in a generation."""
    return f"beside/{number}/{use}"


# Keys of a rank


def left(rank: int) -> str:
    """Return the key that says whether the rank's process is about to leave, or has ended (`departures`).

    Written by the rank and, at its end, by the supervisor; changes.
    """
    return f"left/{rank}"


def listens(rank: int) -> str:
    """Return the key of the generation in which the rank's process began, if it can be asked to save.

    Written by the rank; changes.
    """
    return f"listens/{rank}"


def exit_report(rank: int, number: int) -> str:
    """Return the key of the error with which a process ended, by its rank and the generation in which it began.

    See `exit_report`. Written by that process.
    """
    return f"words/{rank}/{number}"


def shown(digest: str) -> str:
    """Return the key of the process that prints a traceback. Written once, by the first process with the error."""
    return f"shown/{digest}"


def account(number: int) -> str:
    """Return the topic of the ranks' accounts of the incident that led to a generation (`recovery.account`)."""
    return f"account/{number}"


def inexact_count(number: int) -> str:
    """Return the key of how many ranks have found something not to be exact after a recovery. A counter."""
    return f"inexact/{number}"


def inexact(number: int, place: int) -> str:
    """Return the key of what a rank has found not to be exact, as JSON. Written once, by the rank that has counted."""
    return f"inexact/{number}/{place}"


FAILED = "incident/failed"
"""The rank that reports the last incident. Written once, by the first rank that gives up."""


def journal(rank: int, segment: int, group: str, part: str, number: int) -> str:
    """Return the key of the result that a collective outside of training gave a rank (`journal`).

    Written by that rank.
    """
    return f"journal/{rank}/{segment}/{group}/{part}/{number}"


def note(rank: int, topic: str) -> str:
    """Return the key of plain data that a rank leaves to its replacement. Written by that rank; changes."""
    return f"note/{rank}/{topic}"


def written(what: str) -> str:
    """Return the key of what rank 0 has written to files since each snapshot, for its replacement.

    Written by rank 0; changes.
    """
    return f"written/{what}"


def blob(name: str) -> str:
    """Return the key of the number of pieces of a large value (`blobs`), on several nodes.

    Written by a rank that has the value, after the pieces.
    """
    return f"blob/{name}"


def piece(name: str, number: int) -> str:
    """Return the key of a piece of a large value. Written by a rank that has the value."""
    return f"blob/{name}/{number}"


# Keys of loggers, and of what is done once for all ranks

FIRST_RUNS = "runs/first"
"""The loggers' runs of the process that became the supervisor. Written before any rank starts."""


def runs(rank: int) -> str:
    """Return the key of the loggers' runs of a rank. Written by that rank."""
    return f"runs/{rank}"


def rank0_result(number: int) -> str:
    """Return the key of the result of the ``number``-th task that only rank 0 does before training.

    Written by rank 0.
    """
    return f"rank0/{number}"


def rank0_began(number: int) -> str:
    """Return the key that is present once rank 0 does the ``number``-th of these tasks. Written by rank 0."""
    return f"rank0/{number}/began"


# Keys of the end

GASP = "gasp"
"""Where the dying gasp is. Written as soon as it is published, by the ranks that wrote it."""


def gasping(number: int) -> str:
    """Return the topic under which the survivors of a run exchange their reports, in a generation."""
    return f"gasp/{number}"


def come_to_save(rank: int) -> str:
    """Return the key that is present if a rank has come to write the dying gasp. Written by that rank."""
    return f"gasp/come/{rank}"


ENDING_DIRECTORY = "ending/where"
"""Where the run's checkpoints are. Written once, by the first rank that knows the directory."""


def ending_step(rank: int) -> str:
    """Return the key of the step at which a rank could not continue. Written by that rank; changes."""
    return f"ending/step/{rank}"


ENDING_LAST_STEP = "ending/last_step"
"""The step of the dying gasp. Written as soon as it is published."""

ENDING_COUNTED = "ending/counted"
"""How many processes have tried to count this run's failure. A counter: only the first one counts it."""

ENDING_CODE = "ending/code"
"""The exit code that the run ends with. Written by the process that counts the failure."""


# Keys of standbys

STANDBY_CALLS = "standby/calls"
"""How often ranks have asked for standbys. A counter."""


def standby_call(number: int) -> str:
    """Return the key of the modules that a standby imports before it waits, as JSON. Written by the asking rank."""
    return f"standby/call/{number}"


# Keys of nodes


def attempt(run_id: str) -> str:
    """Return the key of the number of a run's newest attempt. In the whole store. Changes, by compare-and-set."""
    return f"{run_id}/attempt"


def secret(run_id: str) -> str:
    """Return the key by which nodes see that others have another secret. In the whole store. Written by every node."""
    return f"{run_id}/secret"


CLOSED = "closed"
"""Present once an attempt is over. Written by a node whose ranks have ended, or that finds no node alive."""

NODES_COME = "nodes/come"
"""How many nodes have come. A counter, which gives each node its number."""

NODES_FACTS = "nodes/facts"
"""The name of the node that came first, and how it was started, as JSON. Written once, by that node."""

SEPARATE = "apart"
"""Present if the holders of every shard stand on different nodes. Written by every rank."""

NODES_LEFT = "nodes/left"
"""How many nodes have left a run that is over. A counter: the node that serves the store waits for all."""


def node(number: int) -> str:
    """Return the key of a node's address and name. Written once, by that node."""
    return f"nodes/member/{number}"


def beat(number: int) -> str:
    """Return the key of a node's heartbeat (`nodes.liveness`). Written by that node; changes."""
    return f"nodes/beat/{number}"


NODES_FIRST = "nodes/first"
"""The first placement of nodes. Written once, by the first node that lives. Others are in `generation`."""


def failover(number: int) -> str:
    """Return the key of the address of the ``number``-th store that takes the place of a lost one.

    In the store of a node. Written by its supervisor.
    """
    return f"failover/{number}"


AGREED = "nodes/agreed"
"""The nodes that are dead, as JSON, once all others use a store that takes the place of a lost one.

Written once, by the node that serves that store."""


NODES_AGREE = "nodes/agree"
"""How many nodes have entered a store that takes the place of a lost one. A counter.

A spare that came shortly before is not known to the node that serves this store."""


def agrees(number: int) -> str:
    """Return the key of the newest generation that a node has known when it lost the store. Written by that node."""
    return f"nodes/agrees/{number}"


# Keys of faults on purpose


def injected(number: int) -> str:
    """Return the key of which faults of a trainer's injector have struck. Written by the ranks that they strike.

    Under the same key and ``/begun`` stands when training began. Written once, by the first rank that asks.
    """
    return f"injected/{number}"
