"""Where training stood when a checkpoint was written, and how a fit goes on from exactly there.

[Note: places]
Lightning's own resuming guesses from its counters and leaves out what was still to come when the checkpoint was
written: a validation that was due, a plateau scheduler's step, the end of the epoch. Here a fit goes on at the very
place, which the counters tell too (`place_of`):

- "batch_end", in `on_train_batch_end`: the batch's logging, a validation that is due, then the next batch;
- "validation_end", in `on_validation_end`: what follows a validation, then the next batch;
- "epoch_end", in `on_train_epoch_end`: what is left of the epoch's end, then the next epoch;
- "batch", before the next batch of the epoch;
- "tail", after an update, before all that follows it in its batch: only in a dying gasp (`record_last`);
- None, between epochs: the next epoch.

Gradients are in no checkpoint. One that is written while a window of batches is under way goes back to the window's
start, whose snapshot every rank has, and begins the window again.

[Note: other worlds]
Random numbers, workers and metrics under way belong to ranks. With another number of ranks, and from a checkpoint that
another strategy has written, the fit goes on with the random numbers that its seed gives and with metrics of what is
still to come. Its position is the next window's start that repeats no sample of the epoch. After an update whose tail
was still to come, schedulers step, and hooks that would have seen its batch are not called.
"""

import copy
import io
import logging
import math
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_replica import plain
from lightning_replica import snapshot as snapshots
from lightning_replica._compat.tree import Tree
from lightning_replica.data.fetches import Fetching
from lightning_replica.data.in_loops import training_fetches, training_loaders
from lightning_replica.data.loader_state import LoaderState
from lightning_replica.session import Session
from lightning_replica.sharding.collectives import all_gather_bytes
from lightning_replica.snapshot import Place, Snapshot
from lightning_replica.structure import grow, names_of_modules
from lightning_replica.training import Training

log = logging.getLogger(__name__)

_BATCHES = "epoch_loop.batch_progress"
_STEPS = "epoch_loop.automatic_optimization.optim_progress"


def place_of(loops: dict[str, Any]) -> Place | None:
    """Where the loops stood, by the counters in `_FitLoop.state_dict`."""
    epoch, batch = loops["epoch_progress"]["current"], loops[f"{_BATCHES}"]["current"]
    if epoch["ready"] == epoch["completed"] or epoch["started"] < epoch["ready"]:
        return None
    if epoch["processed"] == epoch["ready"]:
        return "epoch_end"
    if batch["ready"] == batch["completed"]:
        return "validation_end"
    return "batch_end" if batch["processed"] == batch["ready"] else "batch"


def record(trainer: pl.Trainer, training: Training) -> dict[str, Any]:
    """What this strategy adds to a checkpoint. Collective over the world; whole on rank 0.

    Returns:
        Nothing inside of a window without recovery; otherwise
        ``host``: replicated state (see `snapshot`), with the place; ``ranks``: each rank's private state;
        ``world_size`` and ``samples``: the position for other worlds, in samples of all ranks, None if unknown.
    """
    taken = training.host.window(training.state.step)
    if training.host.is_past(training.state.step):
        return {}  # how the window began is not known; it is begun again as if from a checkpoint of DDP's
    if taken is None:
        tree = Tree.of(trainer.lightning_module)
        host = copy.deepcopy(snapshots.capture_progress(trainer, tree))
        host["place"] = place_of(host["loops"])
        loss, rng = training.host.loss(training.state.step), training.device.rng_state()
        taken = Snapshot("tail", 0, host, rng, [], loss=loss, fresh=True)
        snapshots.take_private(trainer, taken, tree)
        if host["place"] in (None, "epoch_end"):
            ahead = snapshots.fetched_ahead(trainer)
            taken.loaders, taken.fetching = training_fetches(trainer).state_between_epochs(ahead)
    buffer = io.BytesIO()
    torch.save(_private(taken), buffer)
    groups = training.groups
    everyone = all_gather_bytes(buffer.getvalue(), groups.world, training.check)
    if groups.rank != 0:
        return {}
    return {
        "host": {"place": "batch", **taken.replicated, "modules": names_of_modules(trainer.lightning_module)},
        "ranks": [plain.load(each) for each in everyone],
        "world_size": len(everyone),
        "samples": _samples(trainer, len(everyone), taken.replicated["loops"]),
    }


def record_last(
    trainer: pl.Trainer, taken: Snapshot, commit: tuple[float, ...], privates: dict[int, bytes], world_size: int
) -> dict[str, Any]:
    """The same for a dying gasp, of whatever snapshot the ranks have agreed on. Not collective.

    Args:
        trainer: The trainer, put back to the snapshot.
        taken: The snapshot.
        commit: The commit vector of the step before, if there was one.
        privates: Each rank's private state, as it is mirrored; where one is missing, random numbers are lost.
        world_size: Number of ranks of the run.
    """
    place = taken.place if taken.fresh else taken.kind
    complete = len(privates) == world_size
    ranks = [Snapshot.of_private(taken.kind, taken.step, privates[rank]) for rank in range(world_size * complete)]
    return {
        "host": {
            **taken.replicated,
            "place": place,
            "commit": commit if place == "tail" else (),
            "modules": names_of_modules(trainer.lightning_module),
        },
        "ranks": [_private(each) for each in ranks],
        "world_size": len(ranks),
        "samples": _samples(trainer, world_size, taken.replicated["loops"]),
    }


def count_tail(checkpoint: dict[str, Any]) -> None:
    """Has Lightning's part of a checkpoint say what its weights hold, where that was written in a tail.

    Other strategies then take it for one that was written in `on_train_batch_end`. Only schedulers lag behind: their
    step was still to come, and without their optimizer nobody can make it.
    """
    loops = checkpoint["loops"]["fit_loop"]
    steps = loops[_STEPS]["optimizer"]["step"]["total"]
    checkpoint["global_step"] += steps["ready"] - steps["completed"]
    _count_update(loops)
    for counters in (loops[_BATCHES]["total"], loops[_BATCHES]["current"]):
        counters["processed"] = counters["ready"]


def _private(taken: Snapshot) -> dict[str, Any]:
    return {
        "rng": taken.rng,
        "results": taken.results,
        "loaders": [tuple(state) for state in taken.loaders],
        "fetching": tuple(taken.fetching),
        "validation": [tuple(state) for state in taken.validation],
        "loss": taken.loss,
        "metric_states": taken.metric_states,
    }


def read(trainer: pl.Trainer, session: Session, loops: dict[str, Any], own: dict[str, Any]) -> Snapshot | None:
    """Where the fit goes on; None if it had not begun, as with the checkpoints of Lightning's tuners.

    Args:
        trainer: The trainer, with its data set up and the rest of the checkpoint loaded.
        session: This process's part in the world.
        loops: Lightning's counters, from the checkpoint.
        own: What `record` has added; empty in another strategy's checkpoint.
    """
    if loops["epoch_progress"]["current"]["ready"] == 0:
        return None
    if own and own["world_size"] == session.grid.world_size:
        host, private = {**own["host"], "metrics_known": True}, own["ranks"][session.rank]
        taken = Snapshot("tail", 0, host, private["rng"], private["results"], loss=private["loss"], fresh=True)
        private = _as_today(private)
        taken.loaders = [LoaderState.of(state) for state in private["loaders"]]
        taken.fetching = Fetching.of(private["fetching"])
        taken.validation = [LoaderState.of(state) for state in private["validation"]]
        taken.metric_states = private["metric_states"]
        _follow(trainer.lightning_module, taken)
    else:
        taken = _elsewhere(trainer, session, own["host"]["loops"] if own else loops, own)
    taken.replicated["loops"] = _between_epochs(taken.replicated["loops"])
    return taken


def _as_today(private: dict[str, Any]) -> dict[str, Any]:
    """Return a rank's private state as `_private` writes it, where an earlier version has written it.

    Up to 09b1d78 each loader's state ended with the random states before the next batches, and nothing was kept of
    validation loaders.
    """
    if "fetching" in private:
        return private
    random = private["loaders"][0][-1] if private["loaders"] else ()
    loaders = [state[:-1] for state in private["loaders"]]
    return {**private, "loaders": loaders, "fetching": (None, random), "validation": []}


def _follow(module: pl.LightningModule, taken: Snapshot) -> None:
    """Takes submodules into account that the script has added or left out since the checkpoint was written."""
    host = taken.replicated
    written = host.pop("modules", None)
    if written is None:
        return  # an earlier version has written it, which knew of no others
    grow(module, written)
    own = names_of_modules(module)
    if own == written:
        return
    log.warning(
        "The module has other submodules than the one in the checkpoint (%s): the epoch's metrics begin anew here.",
        ", ".join(sorted({*own} ^ {*written})[:5]) or "in another order",
    )
    training = dict(zip(written, host["training"], strict=True))
    host["training"] = [training.get(name, submodule.training) for name, submodule in module.named_modules()]
    host["metrics_known"], taken.results, taken.metric_states = False, [], []


def _elsewhere(trainer: pl.Trainer, session: Session, loops: dict[str, Any], own: dict[str, Any]) -> Snapshot:
    """From a checkpoint of another world, or of another strategy."""
    now = snapshots.capture_progress(trainer, Tree.of(trainer.lightning_module))
    host = {**now, "loops": copy.deepcopy(loops), "metrics_known": False}
    if own:
        host |= {key: own["host"][key] for key in ("logged", "accumulate")}
    place, batch = place_of(loops), host["loops"][_BATCHES]
    in_tail = bool(own) and own["host"]["place"] == "tail"
    done = batch["current"]["completed" if place == "batch" and not in_tail else "ready"]
    host["schedulers_due"] = in_tail or bool(own and own["host"].get("schedulers_due"))
    if in_tail:
        host["commit"] = own["host"]["commit"]  # none if a run has gone on from it, and ended in the tail again
        _count_update(host["loops"])
    if place in ("batch", "batch_end", "validation_end"):
        window = trainer.accumulate_grad_batches
        begun = done // window * window  # the first half of a window is lost: its gradients are not in the checkpoint
        if own:
            begun = _batches(trainer, session.grid.world_size, own["samples"], begun)
        if begun != done or own:
            place, done = "batch", begun
        if place == "batch":
            _put_batches(batch, done)
    host["place"], host["logger_fx"] = place, [done == 1 if place else None, None]
    state = LoaderState(done - (place == "batch_end"))
    loaders = [_within(loader, state) for loader in training_loaders(trainer)]
    return Snapshot("tail", 0, host, session.device.rng_state(), [], loaders, fresh=True)


def _count_update(loops: dict[str, Any]) -> None:
    """Counts the update whose tail was still to come."""
    for counters in loops[_STEPS]["optimizer"]["step"].values():
        counters["completed"] = counters["ready"]


def _between_epochs(loops: dict[str, Any]) -> dict[str, Any]:
    """Forgets an epoch of which only the first hook has been called: it is called again."""
    loops = copy.deepcopy(loops)
    for counters in loops["epoch_progress"].values():
        counters["ready"] = counters["started"]
    return loops


def _put_batches(progress: dict[str, Any], batches: int) -> None:
    """Makes ``batches`` of this epoch done."""
    difference = batches - progress["current"]["completed"]
    for name, counters in progress.items():
        if isinstance(counters, dict):
            done = counters["completed"] + difference
            progress[name] = dict.fromkeys(counters, done)
    progress["is_last_batch"] = False


def _batch_samples(trainer: pl.Trainer, world_size: int) -> int | None:
    """Samples of one batch on all ranks, as the first loader has it."""
    loaders = training_loaders(trainer)
    size = getattr(loaders[0], "batch_size", None) if loaders else None
    return size * world_size if isinstance(size, int) else None


def _samples(trainer: pl.Trainer, world_size: int, loops: dict[str, Any]) -> int | None:
    batches = loops[_BATCHES]["current"]["ready"]
    each = _batch_samples(trainer, world_size)
    return None if each is None else batches * each


def _batches(trainer: pl.Trainer, world_size: int, samples: int | None, same: int) -> int:
    """The first start of a window in this world that lies behind ``samples``; ``same`` if that is unknown."""
    each = _batch_samples(trainer, world_size)
    batches = same if samples is None or each is None else math.ceil(samples / each)
    window = trainer.accumulate_grad_batches
    limit = trainer.num_training_batches
    return int(min(math.ceil(batches / window) * window, limit))


def _within(loader: Any, state: LoaderState) -> LoaderState:
    """A loader that is shorter than the epoch begins again and again."""
    try:
        return state if state.batches <= len(loader) else state._replace(batches=state.batches % len(loader))
    except TypeError:
        return state
