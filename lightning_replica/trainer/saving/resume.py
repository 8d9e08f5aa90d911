"""Where training stood when a checkpoint was written, and how a fit resumes from exactly there.

[Note: places]
When Lightning itself resumes, it guesses from its counters and leaves out what was still to come when the checkpoint
was written: a validation that was due, a plateau scheduler's step, the end of the epoch. Here a fit resumes at the
exact place, which the counters also tell (`place_of`). For each place, this is where it lies and what comes next:

- "batch_end", in `on_train_batch_end`: the batch's logging, a validation that is due, then the next batch;
- "validation_end", in `on_validation_end`: what follows a validation, then the next batch;
- "epoch_end", in `on_train_epoch_end`: what is left of the epoch's end, then the next epoch;
- "batch", before the next batch of the epoch: that batch;
- "tail", after an update, before all that follows it in its batch: only in a dying gasp (`record_last`);
- None, between epochs: the next epoch.

A checkpoint holds no gradients of an unfinished window. One that is written in the middle of a window therefore goes
back to the window's start, of which every rank has a snapshot, and the window is done again. Gradients that lie there
at the window's start, and to which a later step adds or which code reads, are saved (`carried_gradients`).

[Note: other worlds]
Random numbers, workers and metrics under way belong to ranks. With another number of ranks, with a model that is
divided otherwise among as many ranks, or from a checkpoint that another strategy has written, the fit resumes with the
random numbers that its seed gives, and its metrics cover only what is still to come. It begins at the first window's
start that repeats no sample of the epoch. After an update whose tail was still to come, schedulers step, but hooks that
would have seen its batch are not called.
"""

import copy
import io
import logging
import math
from dataclasses import asdict, replace
from typing import Any

import torch

from lightning_replica._compat.lightning_names import pl
from lightning_replica._compat.tree import Tree
from lightning_replica.core import plain
from lightning_replica.core.exchange import all_gather_bytes
from lightning_replica.core.messages import say
from lightning_replica.sharding.engine import Engine
from lightning_replica.state import trainer_state
from lightning_replica.state.data.fetches import Fetching
from lightning_replica.state.data.in_loops import training_fetches, training_loaders
from lightning_replica.state.data.loader_state import LoaderState
from lightning_replica.state.metrics import MetricStates, as_lists
from lightning_replica.state.objects.tracked import LEFT_OUT
from lightning_replica.state.reachable import SAVED_HOOKS
from lightning_replica.state.snapshot import Local, Place, Private, Replicated, ResumePoint, Snapshot
from lightning_replica.state.structure import Outline, grow, names_of_modules
from lightning_replica.trainer import carried_gradients
from lightning_replica.trainer.session import Session
from lightning_replica.trainer.steps import Training

log = logging.getLogger(__name__)

_BATCHES = "epoch_loop.batch_progress"
_STEPS = "epoch_loop.automatic_optimization.optim_progress"


def place_of(loops: dict[str, Any]) -> Place | None:
    """Return where the loops stood, by the counters in `_FitLoop.state_dict`; None between epochs."""
    epoch, batch = loops["epoch_progress"]["current"], loops[f"{_BATCHES}"]["current"]
    if epoch["ready"] == epoch["completed"] or epoch["started"] < epoch["ready"]:
        return None
    if epoch["processed"] == epoch["ready"]:
        return "epoch_end"
    if batch["ready"] == batch["completed"]:
        return "validation_end"
    return "batch_end" if batch["processed"] == batch["ready"] else "batch"


def record(trainer: pl.Trainer, training: Training) -> dict[str, Any]:
    """Return what this strategy adds to a checkpoint. Collective over the world; other ranks than 0 get nothing.

    Returns:
        Nothing inside of a window without recovery; otherwise
        ``host``: replicated state (see `snapshot`), with the place; ``ranks``: each rank's private state;
        ``world_size`` and ``division``: how many ranks there were, and which of them had the same part of the model;
        ``samples``: the position for other worlds, in samples of all ranks, None if unknown.
    """
    taken = training.host.window(training.state.step)
    if training.host.is_past(training.state.step):
        return {}  # without a snapshot of its start, the window is done again as from a checkpoint of DDP's
    place: Place | None = "batch"
    if taken is None:
        taken = _between_windows(trainer, training)
        place = taken.place
    buffer = io.BytesIO()
    torch.save(_private(training.host.saved(taken).private), buffer)
    groups = training.groups
    everyone = all_gather_bytes(buffer.getvalue(), groups.world, training.check)
    if groups.rank != 0:
        return {}
    return {
        "host": _host(trainer, training.state, training.host.outline(), taken, ResumePoint(place)),
        "ranks": [plain.load(each) for each in everyone],
        "world_size": len(everyone),
        "division": _division(trainer),
        "samples": _samples(trainer, taken.replicated.progress.loops),
    }


def _between_windows(trainer: pl.Trainer, training: Training) -> Snapshot:
    """Return a snapshot of the place in the loops where they stand now. Collective."""
    tree = Tree.of(trainer.lightning_module)
    progress = copy.deepcopy(trainer_state.capture_progress(trainer, tree))
    point = ResumePoint(place_of(progress.loops))
    loss, extras = training.host.outputs(training.state.step)
    rng = training.device.rng_state()
    training.share_buffers()
    due, buffers = training.host.own_buffers()
    private = Private(rng, loss=loss, extras=extras, fresh=True, buffers=buffers)
    taken = Snapshot("tail", 0, Replicated(progress, point=point, buffers_due=due), private)
    trainer_state.take_data(trainer, taken, tree, MetricStates())
    if point.place not in (None, "epoch_end"):
        return taken
    ahead = trainer_state.fetched_ahead(trainer)
    loaders, fetching = training_fetches(trainer).state_between_epochs(ahead)
    return replace(taken, private=replace(taken.private, loaders=loaders, fetching=fetching))


def _host(trainer: pl.Trainer, state: Engine, outline: Outline, taken: Snapshot, point: ResumePoint) -> dict[str, Any]:
    """Return the replicated state of a snapshot as a checkpoint holds it."""
    point = replace(
        point,
        modules=names_of_modules(trainer.lightning_module),
        outline=asdict(outline),
        gradients=carried_gradients.packed(trainer, state),
    )
    return replace(taken.replicated, point=point).flat()


def record_last(
    trainer: pl.Trainer,
    state: Engine,
    outline: Outline,
    taken: Snapshot,
    commit: tuple[float, ...],
    privates: dict[int, bytes],
    world_size: int,
) -> dict[str, Any]:
    """Return what `record` returns, for a dying gasp, from the snapshot that the ranks agreed on. Not collective.

    Args:
        trainer: The trainer, restored to the snapshot.
        state: The sharded state, restored to it.
        outline: How the model is built.
        taken: The snapshot.
        commit: The commit vector of the step before, if there was one.
        privates: Each rank's private state, as it is mirrored. If one is missing, none is saved, and random numbers are
            lost.
        world_size: Number of ranks of the run.
    """
    place = taken.place if taken.private.fresh else taken.kind
    complete = len(privates) == world_size
    ranks = [Private.unpack(privates[rank]) for rank in range(world_size * complete)]
    point = replace(taken.replicated.point or ResumePoint(None), place=place, agreed=commit if place == "tail" else ())
    return {
        "host": _host(trainer, state, outline, taken, point),
        "ranks": [_private(each) for each in ranks],
        "world_size": len(ranks),
        "division": _division(trainer),
        "samples": _samples(trainer, taken.replicated.progress.loops),
    }


def count_tail(checkpoint: dict[str, Any]) -> None:
    """Make Lightning's part of a checkpoint that was written in a tail count the update that its weights hold.

    Other strategies then take it for one that was written in `on_train_batch_end`. Only schedulers lag behind: their
    step was still to come, and it cannot be made without their optimizer.
    """
    loops = checkpoint["loops"]["fit_loop"]
    steps = loops[_STEPS]["optimizer"]["step"]["total"]
    checkpoint["global_step"] += steps["ready"] - steps["completed"]
    _count_update(loops)
    for counters in (loops[_BATCHES]["total"], loops[_BATCHES]["current"]):
        counters["processed"] = counters["ready"]


def _private(private: Private) -> dict[str, Any]:
    """Return a rank's private part as a checkpoint holds it."""
    return {
        "rng": private.rng,
        "results": private.results,
        "loaders": [tuple(state) for state in private.loaders],
        "fetching": tuple(private.fetching),
        "validation": [tuple(state) for state in private.validation],
        "loss": private.loss,
        "metric_states": as_lists(private.metric_states),
        "extras": private.extras or None,  # pickle writes empty bytes as a call, which is not read again
        "objects": bytes(private.objects) or None,
        "buffers": private.buffers or None,
        "attributes": private.attributes or None,
    }


def _read_private(saved: dict[str, Any]) -> Private:
    """Return what `_private` was called on; in a fit that resumes."""
    return Private(
        rng=saved["rng"],
        results=saved["results"],
        loaders=[LoaderState.of(state) for state in saved["loaders"]],
        fetching=Fetching.of(saved["fetching"]),
        validation=[LoaderState.of(state) for state in saved["validation"]],
        loss=saved["loss"],
        fresh=True,
        metric_states=saved["metric_states"],
        extras=saved.get("extras") or b"",  # an earlier version wrote none of these
        objects=saved.get("objects") or b"",
        buffers=saved.get("buffers") or b"",
        attributes=saved.get("attributes") or b"",
    )


def read(trainer: pl.Trainer, session: Session, loops: dict[str, Any], own: dict[str, Any]) -> Snapshot | None:
    """Return where the fit resumes; None if it had not begun, as with the checkpoints of Lightning's tuners.

    Args:
        trainer: The trainer, with its data set up and the rest of the checkpoint loaded.
        session: The session of this process.
        loops: Lightning's counters, from the checkpoint.
        own: What `record` has added; empty in another strategy's checkpoint.
    """
    if loops["epoch_progress"]["current"]["ready"] == 0:
        return None
    if own:
        own = {**own, "host": _host_as_today(own["host"])}
    same = bool(own) and own["world_size"] == session.world.size
    if same and own.get("division", _division(trainer)) == _division(trainer):
        private = _read_private(_as_today(own["ranks"][session.rank]))
        host = {**own["host"], "metrics_known": True}
        taken = Snapshot("tail", 0, Replicated.of(host), private, Local.of(private))
        taken = _follow(trainer.lightning_module, taken)
    else:
        taken = _elsewhere(trainer, session, own["host"]["loops"] if own else loops, own)
        names = _attributes_in(own["ranks"]) if own and session.rank == 0 else []
        if names:
            log.warning(
                "The number of ranks, or how they divide the model, has changed since the checkpoint was written. What"
                " each rank's objects held is not restored: %s.",
                ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else ""),
            )
    progress = taken.replicated.progress
    if progress.should_stop and session.rank == 0:
        say(
            "when the checkpoint was written, the fit had been told to stop (trainer.should_stop, as by EarlyStopping)."
            " It ends as soon as `min_epochs` and `min_steps` allow; raise them to train on."
        )
    progress = replace(progress, loops=_between_epochs(progress.loops))
    return replace(taken, replicated=replace(taken.replicated, progress=progress))


def _attributes_in(ranks: list[dict[str, Any]]) -> list[str]:
    """Return the names of the attributes that ranks have saved."""
    packed = [plain.unpack(private["objects"]) for private in ranks if private.get("objects")]
    names = (f"{root}.{name}" for each in packed for root, pairs in each if _is_root(root) for name, _ in pairs)
    return [*dict.fromkeys(names)]


def _is_root(name: str) -> bool:
    return name not in (LEFT_OUT, SAVED_HOOKS)


def _host_as_today(host: dict[str, Any]) -> dict[str, Any]:
    """Return the replicated state as it is written now, whichever version wrote it.

    Up to b3fdbaf the commit was named otherwise, and did not say how many ranks' epochs end.
    """
    if "commit" not in host:
        return host
    host = dict(host)
    numbers = tuple(host.pop("commit") or ())
    return {**host, "agreed": (*numbers[:4], 0.0, *numbers[4:]) if numbers else ()}


def _as_today(private: dict[str, Any]) -> dict[str, Any]:
    """Return a rank's private state as `_private` writes it now, whichever version wrote it.

    Up to 09b1d78 each loader's state ended with the random states before the next batches, and nothing was kept of
    validation loaders.
    """
    if "fetching" in private:
        return private
    random = private["loaders"][0][-1] if private["loaders"] else ()
    loaders = [state[:-1] for state in private["loaders"]]
    return {**private, "loaders": loaders, "fetching": (None, random), "validation": []}


def _follow(module: pl.LightningModule, taken: Snapshot) -> Snapshot:
    """Adapt a snapshot to submodules that the script has added or removed since the checkpoint was written."""
    progress, point = taken.replicated.progress, taken.replicated.point
    written = None if point is None else point.modules
    if point is None or written is None:
        return taken  # an earlier version wrote the checkpoint, which refused other submodules
    grow(module, written)
    own = names_of_modules(module)
    if own == written:
        return taken
    log.warning(
        "The submodules of the module differ from those in the checkpoint (%s): the epoch's metrics start anew here.",
        ", ".join(sorted({*own} ^ {*written})[:5]) or "in a different order",
    )
    training = dict(zip(written, progress.training, strict=True))
    modes = [training.get(name, submodule.training) for name, submodule in module.named_modules()]
    replicated = replace(
        taken.replicated, progress=replace(progress, training=modes), point=replace(point, metrics_known=False)
    )
    return replace(taken, replicated=replicated, private=replace(taken.private, results=[], metric_states=[]))


def _elsewhere(trainer: pl.Trainer, session: Session, loops: dict[str, Any], own: dict[str, Any]) -> Snapshot:
    """Return where a fit resumes from a checkpoint of another world or of another strategy."""
    saved = own["host"] if own else {}
    in_tail = bool(own) and saved["place"] == "tail"
    place, loops = place_of(loops), copy.deepcopy(loops)
    batch = loops[_BATCHES]
    done = batch["current"]["completed" if place == "batch" and not in_tail else "ready"]
    if in_tail:
        _count_update(loops)
    if place in ("batch", "batch_end", "validation_end"):
        window = trainer.accumulate_grad_batches
        begun = done // window * window  # to the window's start: its gradients are not in the checkpoint
        if own:
            begun = _batches(trainer, own["samples"], begun)
        if begun != done or own:
            place, done = "batch", begun
        if place == "batch":
            _put_batches(batch, done)
    point = ResumePoint(
        place,
        metrics_known=False,
        agreed=saved["agreed"] if in_tail else (),  # empty if a run has resumed from it and ended in that tail again
        schedulers_due=in_tail or bool(saved.get("schedulers_due")),
        gradients=saved.get("gradients", b""),
    )
    now = trainer_state.capture_progress(trainer, Tree.of(trainer.lightning_module))
    kept = {key: saved[key] for key in ("logged", "accumulate", "gradient", "should_stop") if key in saved}
    progress = replace(now, loops=loops, logger_fx=[done == 1 if place else None, None], **kept)
    state = LoaderState(done - (place == "batch_end"))
    loaders = [_within(loader, state) for loader in training_loaders(trainer)]
    private = Private(session.world.device.rng_state(), loaders=loaders, fresh=True)
    return Snapshot("tail", 0, Replicated(progress, point=point), private)


def _count_update(loops: dict[str, Any]) -> None:
    """Count the update whose tail was still to come."""
    for counters in loops[_STEPS]["optimizer"]["step"].values():
        counters["completed"] = counters["ready"]


def _between_epochs(loops: dict[str, Any]) -> dict[str, Any]:
    """Return the counters without an epoch of which only the first hook was called; the hook is called again."""
    loops = copy.deepcopy(loops)
    for counters in loops["epoch_progress"].values():
        counters["ready"] = counters["started"]
    return loops


def _put_batches(progress: dict[str, Any], batches: int) -> None:
    """Set the counters to ``batches`` done batches in this epoch."""
    difference = batches - progress["current"]["completed"]
    for name, counters in progress.items():
        if isinstance(counters, dict):
            done = counters["completed"] + difference
            progress[name] = dict.fromkeys(counters, done)
    progress["is_last_batch"] = False


def _division(trainer: pl.Trainer) -> list[Any]:
    """Return which ranks have the same part of the model, and how many read different data."""
    strategy: Any = trainer.strategy
    grids = strategy.grids
    named = [[name, *grid.ranks] for name, grid in zip(grids.names, grids.grids, strict=True)]
    return [_readers(trainer), named, [[*grid.ranks] for grid in grids.experts]]


def _readers(trainer: pl.Trainer) -> int:
    """Return how many ranks read different data."""
    count: int = trainer.strategy.distributed_sampler_kwargs["num_replicas"]  # type: ignore[attr-defined]
    return count


def _batch_samples(trainer: pl.Trainer) -> int | None:
    """Return the number of samples of one batch on all ranks, by the first loader; None if unknown."""
    loaders = training_loaders(trainer)
    size = getattr(loaders[0], "batch_size", None) if loaders else None
    return size * _readers(trainer) if isinstance(size, int) else None


def _samples(trainer: pl.Trainer, loops: dict[str, Any]) -> int | None:
    batches = loops[_BATCHES]["current"]["ready"]
    each = _batch_samples(trainer)
    return None if each is None else batches * each


def _batches(trainer: pl.Trainer, samples: int | None, same: int) -> int:
    """Return the first start of a window in this world, in batches, behind ``samples``, or ``same`` if unknown."""
    each = _batch_samples(trainer)
    batches = same if samples is None or each is None else math.ceil(samples / each)
    window = trainer.accumulate_grad_batches
    limit = trainer.num_training_batches
    return int(min(math.ceil(batches / window) * window, limit))


def _within(loader: Any, state: LoaderState) -> LoaderState:
    """Return the state within one pass of the loader: one that is shorter than the epoch begins again and again."""
    try:
        return state if state.batches <= len(loader) else state._replace(batches=state.batches % len(loader))
    except TypeError:
        return state
