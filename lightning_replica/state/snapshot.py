"""A snapshot of a rank's host state, in three parts: what all ranks share, what peers keep, and what stays here.

[Note: the three parts]
`Replicated` is the same on every rank: counters of loops, hyperparameters of param groups, shared buffers and more. A
replacement gets it from a peer.

`Private` belongs to one rank: random numbers, data position, metrics under way, the closure's loss, buffers that differ
from the shared ones (state/module_buffers.py), what the user's objects hold. Its peers keep a copy of it, packed
(recovery.mirror). States of schedulers and callbacks, modes of modules and the values that were last logged are mostly
the same on every rank. They are in both parts, and a replacement uses its predecessor's (state/own_states.py). So are
parameters that no shard holds, and what the model consists of, once code has changed them.

`Local` never leaves the process: objects of the trainer, copies by identity, and what this process has made of the
private part of another.

A checkpoint holds `Replicated` once and the most of `Private` for every rank; see trainer/saving/resume.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias, TypeVar

import torch

from lightning_replica.core import plain
from lightning_replica.core.inexact import warn
from lightning_replica.core.recoverable import Kind
from lightning_replica.errors import RecoveryError, ReplicaError
from lightning_replica.state import own_states
from lightning_replica.state.data.fetches import Fetching
from lightning_replica.state.data.loader_state import LoaderState
from lightning_replica.state.data_setup import DataSetup
from lightning_replica.state.frozen import FrozenValues
from lightning_replica.state.metrics import pack_states, unpack_states
from lightning_replica.state.objects.tracked import Taken
from lightning_replica.state.structure import Structure

Place: TypeAlias = Literal["batch", "tail", "batch_end", "validation_end", "epoch_end"]
"""Where in the loops a fit begins that resumes from a checkpoint; see trainer/saving/resume.py."""

T = TypeVar("T")


@dataclass
class Progress:
    """How far training has come.

    Attributes:
        loops: Counters of the loops, as Lightning saves them.
        val_seen: Batches that each validation loader has given.
        val_has_run: Whether a validation has run.
        logged: The values that were last logged, of three kinds: for loggers, for callbacks, for the progress bar.
        logger_fx: Where Lightning's logging stands: whether this is the first batch, and the hook under way.
        training: Whether each submodule is in training mode.
        accumulate: Batches in a window.
        gradient: What the precision plugin remembers of the newest gradient.
        requires_grad: Whether each parameter is trained.
        should_stop: Whether the fit was told to stop.
    """

    loops: dict[str, Any]
    val_seen: dict[Any, Any]
    val_has_run: bool
    logged: list[dict[str, Any]]
    logger_fx: list[Any]
    training: list[bool]
    accumulate: int
    gradient: list[Any] = field(default_factory=list)  # with a default: an earlier version's checkpoint has none
    requires_grad: list[bool] = field(default_factory=list)
    should_stop: bool = False


@dataclass
class Components:
    """The states of what a trainer consists of.

    Attributes:
        schedulers: States of the schedulers; None for one that only the walk over all objects restores.
        precision: State of the precision plugin.
        callbacks: States of callbacks, by ``state_key``; see `callback_state`.
        buffers: The buffers that all ranks share.
        momenta: The momentum of every BatchNorm layer.
        groups: Param groups; see `param_groups`.
        scheduler_configs: Settings of the schedulers, and the names of their attributes.
        fit_loop: Limits of the loop.
        epoch_loop: Limits of the loop.
        trainer: Settings of the trainer that change in training.
        settings: Settings of the process; see `process_settings`.
    """

    schedulers: list[Any]
    precision: dict[str, Any]
    callbacks: dict[str, Any]
    buffers: dict[str, Any]
    momenta: list[float | None]
    # Those below are used of a run's own snapshots only.
    groups: list[Any] = field(default_factory=list)
    scheduler_configs: list[Any] = field(default_factory=list)
    fit_loop: dict[str, Any] = field(default_factory=dict)
    epoch_loop: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class ResumePoint:
    """Where a fit begins that resumes from a checkpoint.

    Attributes:
        place: Where in the loops; None between epochs.
        metrics_known: Whether metrics cover the whole epoch.
        agreed: The commit vector of the update that was made last, if its tail is still to come.
        schedulers_due: Whether schedulers still have to step for that update.
        modules: Names of the submodules; None in a checkpoint that does not say it.
        outline: What the model consisted of, as a dict of `structure.Outline`; None likewise.
        gradients: Gradients that lay between two steps, packed; None if there were some that could not be saved; empty
            in a checkpoint that does not say it.
    """

    place: Place | None
    metrics_known: bool = True
    agreed: tuple[float, ...] = ()
    schedulers_due: bool = False
    modules: list[str] | None = None
    outline: dict[str, Any] | None = None
    gradients: bytes | None = b""

    def flat(self) -> dict[str, Any]:
        """Return the attributes as they are sent and saved: pickle writes empty bytes as a call, which is not read."""
        return {name: value for name, value in vars(self).items() if not (isinstance(value, bytes) and not value)}


@dataclass
class Replicated:
    """The part of a snapshot that is the same on all ranks: plain data and tensors.

    Attributes:
        progress: How far training has come.
        components: None in a checkpoint that was written between two windows, which Lightning's own part describes.
        point: Where training resumes by a checkpoint; only in that checkpoint, and in the snapshot of the tail before
            the first step of a fit that resumes.
        buffers_due: Whether the next forward pass begins with the shared buffers.
    """

    progress: Progress
    components: Components | None = None
    point: ResumePoint | None = None
    buffers_due: bool = True

    def whole(self) -> Components:
        """Return the components.

        Raises:
            ReplicaError: If there are none.
        """
        if self.components is None:
            raise ReplicaError("This snapshot says only how far training had come.")
        return self.components

    def flat(self) -> dict[str, Any]:
        """Return one dict with the attributes of all parts, as it is sent and saved."""
        components = {} if self.components is None else vars(self.components)
        point = {} if self.point is None else self.point.flat()
        return {**vars(self.progress), **components, **point, "buffers_due": self.buffers_due}

    @classmethod
    def of(cls, flat: Mapping[str, Any]) -> "Replicated":
        """Return what `flat` was made from; what it does not know is left out."""
        return cls(
            _part(Progress, flat),
            _part(Components, flat) if "callbacks" in flat else None,
            _part(ResumePoint, flat) if "place" in flat else None,
            flat.get("buffers_due", True),
        )


def _part(cls: type[T], flat: Mapping[str, Any]) -> T:
    names = {each.name for each in fields(cls)}  # type: ignore[arg-type]
    return cls(**{name: value for name, value in flat.items() if name in names})


@dataclass
class Private:
    """The part of a snapshot that belongs to one rank.

    Attributes:
        rng: State of all generators.
        results: Metrics under way, as `metrics.export_results` gives them.
        loaders: The states of the training loaders; in a tail, those before the step's last batch.
        fetching: How far fetching from these loaders has come, at the same point.
        validation: The state of validation loaders that lasts from one validation to the next.
        loss: The training step's loss, as `metrics.to_plain` gives it; only in a tail.
        fresh: Whether this is the tail before the first step of the fit, which has not begun yet.
        extras: What the closure returned beside the loss, packed, if user code may look at it; only in a tail.
        metric_states: States of torchmetrics objects in the module.
        objects: What the user's objects hold, as far as it is mirrored, packed.
        own: States of schedulers and callbacks, modes and logged values, packed; not for checkpoints.
        attributes: What optimizers keep beside their state, packed; only for checkpoints.
        data_setups: How training loaders and validation loaders were made, if they are made more than once.
        buffers: Buffers that differ from the shared ones, packed; empty if they are not mirrored.
        frozen: Parameters that no shard holds, packed; empty if none has been written; not for checkpoints.
        outline: What the module consists of, packed; not for checkpoints.
    """

    rng: bytes
    results: list[dict[str, Any]] = field(default_factory=list)
    loaders: list[LoaderState] = field(default_factory=list)
    fetching: Fetching = Fetching()
    validation: list[LoaderState] = field(default_factory=list)
    loss: list[Any] | None = None
    fresh: bool = False
    extras: bytes = b""
    metric_states: list[dict[str, Any]] = field(default_factory=list)
    objects: bytes | plain.Pieces = b""
    own: bytes | plain.Pieces = b""
    attributes: bytes = b""
    data_setups: list[DataSetup | None] = field(default_factory=list)
    buffers: bytes = b""
    frozen: bytes | plain.Pieces = b""
    outline: bytes = b""

    def pack(self) -> plain.Pieces:
        """Return the part as it is mirrored."""
        # Metric states are the user's, and may hold tuples, and values that cannot be packed.
        metrics = pack_states(self.metric_states, _plain_part) if self.metric_states else plain.Pieces()
        loaders = [[list(state) for state in states] for states in (self.loaders, self.validation)]
        setups = [None if setup is None else list(setup) for setup in self.data_setups]
        small = [self.rng, self.results, *loaders, list(self.fetching), self.loss, self.fresh, metrics, setups]
        packed = [self.extras, self.objects, self.own, self.attributes, self.buffers, self.frozen, self.outline]
        return plain.pack_lists_in_pieces([*small, *packed])

    @classmethod
    def unpack(cls, packed: bytes) -> "Private":
        """Return what `pack` was called on."""
        rng, results, loaders, validation, fetching, loss, fresh, metrics, setups, *rest = plain.unpack(packed)
        extras, objects, own, attributes, buffers, frozen, outline = rest
        return cls(
            rng=rng,
            results=results,
            loaders=[LoaderState.of(state) for state in loaders],
            fetching=Fetching.of(fetching),
            validation=[LoaderState.of(state) for state in validation],
            loss=loss,
            fresh=fresh,
            extras=extras,
            metric_states=unpack_states(metrics) if metrics else [],
            objects=objects,
            own=own,
            attributes=attributes,
            data_setups=[None if setup is None else DataSetup(*setup) for setup in setups],
            buffers=buffers,
            frozen=frozen,
            outline=outline,
        )


@dataclass
class Local:
    """The part of a snapshot that never leaves the process; in one that came from another process, most is missing.

    Attributes:
        batch: The batch of the step; only in a tail.
        output: What the closure returned; only where ``batch`` is.
        reached: What the user's objects hold.
        sent: What objects held in another process: on a replacement, those of its peer, then those of its predecessor,
            which take precedence; from a checkpoint, those of the rank that wrote it.
        buffers: Buffers that differ from the shared ones.
        schedulers: The scheduler configs themselves, which callbacks may replace, with their schedulers; None if they
            are those of another process.
        callbacks: The callbacks, which may remove themselves; None likewise. They are put back before their states
            are, and with all else that the trainer refers to.
        structure: What the module consists of; None if the snapshot came from a checkpoint.
        frozen: What parameters held that no shard holds, as far as they change.
    """

    batch: Any = None
    output: dict[str, Any] = field(default_factory=dict)
    reached: Taken = field(default_factory=Taken)
    sent: tuple[list[Any], ...] = ()
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    schedulers: list[tuple[Any, Any]] | None = None
    callbacks: list[Any] | None = None
    structure: Structure | None = None
    frozen: FrozenValues = field(default_factory=list)

    @classmethod
    def of(cls, private: Private) -> "Local":
        """Return what this process knows of a private part that came from another."""
        return cls(
            sent=(plain.unpack(bytes(private.objects), placed=True),) if private.objects else (),
            buffers=plain.unpack(private.buffers) if private.buffers else {},
        )


@dataclass
class Snapshot:
    """The host state of one rank at one point.

    Attributes:
        kind: "batch": taken before the first batch of a window is fetched. "tail": taken when the commit is entered.
        step: Number of updates that are applied when training resumes from here.
        replicated: See `Replicated`.
        private: See `Private`.
        local: See `Local`.
    """

    kind: Kind
    step: int
    replicated: Replicated
    private: Private
    local: Local = field(default_factory=Local)

    @property
    def place(self) -> Place | None:
        """Where a fit begins that resumes from a checkpoint inside of an epoch."""
        return None if self.replicated.point is None else self.replicated.point.place

    @property
    def metrics_known(self) -> bool:
        """Whether metrics cover the whole epoch. They may not in a run that resumes with other ranks or modules."""
        return self.replicated.point is None or self.replicated.point.metrics_known

    @property
    def schedulers_due(self) -> bool:
        """Whether schedulers still have to step for the update that a run made before it ended."""
        return self.replicated.point is not None and self.replicated.point.schedulers_due

    @property
    def ends_with_batch(self) -> bool:
        """Whether the hooks that follow still have to see the previous batch."""
        return self.place in ("tail", "batch_end") if self.private.fresh else self.kind == "tail"


@dataclass
class ForReplacement:
    """What a replacement gets of a peer beside the peer's `Replicated`.

    Attributes:
        objects: What the user's objects hold, packed, with what is too large to be mirrored; None if it is not sent.
        frozen: Parameters that no shard holds; see `FrozenCopies.export`.
        signature: How the objects of the user's are built, by name.
        differing: In what they differ between ranks; see `builds`.
        outline: What the module consists of, as a dict of `structure.Outline`.
    """

    objects: bytes | None = None
    frozen: dict[str, Any] = field(default_factory=dict)
    signature: dict[str, str] = field(default_factory=dict)
    differing: dict[str, Any] = field(default_factory=dict)
    outline: dict[str, Any] = field(default_factory=dict)


def pack_for_replacement(replicated: Replicated, of_peer: ForReplacement) -> bytes:
    """Return what a replacement gets of a peer.

    Raises:
        RecoveryError: If it holds a value that cannot be sent.
    """
    flat, beside = replicated.flat(), vars(of_peer)
    try:
        return plain.save([flat, beside])
    except plain.NotPlainError as error:
        raise RecoveryError(
            f"A lost rank cannot be replaced: {_culprit({**flat, **beside})} cannot be sent, {error}. Keep numbers,"
            " strings, tensors and containers of these there, or allow the type on every rank with"
            " `torch.serialization.add_safe_globals`."
        ) from error


def unpack_on_replacement(kind: Kind, step: int, from_peer: bytes, private: bytes) -> tuple[Snapshot, ForReplacement]:
    """Return a replacement's snapshot, and what its peer sent beside it.

    Args:
        kind: See `Snapshot`.
        step: See `Snapshot`.
        from_peer: What `pack_for_replacement` returned on a peer.
        private: What `Private.pack` returned on the predecessor.
    """
    flat, beside = plain.load(from_peer)
    own = Private.unpack(private)
    own_states.put(flat, own.own)
    return Snapshot(kind, step, Replicated.of(flat), own, Local.of(own)), ForReplacement(**beside)


_warned: set[str] = set()


def _plain_part(state: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a torchmetrics object's state that can be mirrored.

    A warning names the rest once. A replacement leaves it as the script has built it; a survivor has its own.
    """
    kept = {}
    for name, value in state.items():
        try:
            plain.pack(value)
            kept[name] = value
        except plain.NotPlainError as error:
            if name != "_computed" and name not in _warned:  # what `compute` returned is computed again
                _warned.add(name)
                why = "a replacement starts it anew. Keep tensors, numbers, strings and containers of these in it"
                warn(f"the metric state {name!r}", f"{error}; {why}", "replacement")
    return kept


def _culprit(flat: Mapping[str, Any]) -> str:
    """Return the name of the part of the state that `plain.save` refuses."""
    parts = {f"the state of {key!r}": state for key, state in flat.get("callbacks", {}).items()}
    parts |= {f"{key!r} of the trainer's state": value for key, value in flat.items() if key != "callbacks"}
    for name, part in parts.items():
        try:
            plain.save(part)
        except plain.NotPlainError:
            return name
    return "the trainer's state"
