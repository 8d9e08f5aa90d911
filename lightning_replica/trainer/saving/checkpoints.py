"""What a Lightning checkpoint holds under this strategy, and how a fit loads it."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

from torch import Tensor
from torch.optim import Optimizer

from lightning_replica._compat.lightning import dump_checkpoint, user_optimizer
from lightning_replica._compat.lightning_names import pl
from lightning_replica.checkpoint.barrier import Barrier, StoreBarrier
from lightning_replica.checkpoint.contents import WEIGHTS_AT
from lightning_replica.checkpoint.directory import CheckpointDirectory
from lightning_replica.checkpoint.location import Location
from lightning_replica.checkpoint.manifest import Lineage, Provenance
from lightning_replica.checkpoint.named_model import NamedModel
from lightning_replica.checkpoint.which_storage import storage_of
from lightning_replica.core.messages import warn
from lightning_replica.errors import CheckpointError, ConfigurationError
from lightning_replica.state.snapshot import Snapshot
from lightning_replica.trainer.model_part import ModelPart
from lightning_replica.trainer.saving import resume
from lightning_replica.trainer.saving.async_save import AsyncSave
from lightning_replica.trainer.saving.left_out import left_out, made_plain
from lightning_replica.trainer.session import Session
from lightning_replica.trainer.steps import Training

log = logging.getLogger(__name__)

StateDictType: TypeAlias = Literal["full", "sharded"]
# The entry that other strategies do not use, and drop when they write the checkpoint again.
OWN_KEY = "replica_zero"


@dataclass(frozen=True)
class _RunDirectory:
    """A directory of checkpoints that callbacks have named.

    Attributes:
        directory: The directory.
        keep_last: How many of this fit's checkpoints stay; None for all.
        lineage: What this fit is among those that have written there.
    """

    directory: CheckpointDirectory
    keep_last: int | None
    lineage: Lineage


class Checkpoints:
    """Lightning's checkpoint hooks, in two forms.

    "full" is an ordinary ``.ckpt`` with the whole optimizer state, which DDP can read. "sharded" is a directory to
    which every rank writes its part. The form of a checkpoint is detected when it is loaded.

    Args:
        form: The form to write.
    """

    def __init__(self, form: StateDictType) -> None:
        self._form = form
        self._main: dict[int, dict[int, Tensor]] = {}
        self._directories: dict[Location, _RunDirectory] = {}  # the callbacks', by path
        self._stand_in: dict[str, Any] = {}
        self._directory: Location | None = None  # a sharded checkpoint, from when it is opened until the fit is set up
        self._loaded: tuple[dict[str, Any], dict[str, Any]] | None = None
        self._async_save: AsyncSave | None = None
        self._reported_left_out: Sequence[str] = ()

    def is_sharded(self, training: Training | None) -> bool:
        """Return whether a checkpoint saved now is sharded. Without a fit there are no shards."""
        return self._form == "sharded" and training is not None

    # Saving, in the order of calls

    def stand_in(self) -> dict[str, Any]:
        """Return what a checkpoint has in place of the weights, which go to shards.

        Hooks may move it and put other weights there. Weight averaging does so for users who only want to predict.
        """
        self._stand_in = {}
        return self._stand_in

    def optimizer_state(self, training: Training, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole state of an optimizer on rank 0, nothing on other ranks. Collective."""
        if self._form == "sharded":
            return {}
        inner = user_optimizer(optimizer)
        whole = training.state.gather_optimizer(inner)
        self._main[[each.optimizer for each in training.state.optimizers].index(inner)] = whole.main
        return whole.state_dict

    def complete(self, trainer: pl.Trainer, training: Training, checkpoint: dict[str, Any]) -> None:
        """Add what only this strategy reads. Collective over the world.

        That is the main parameters, where weights have 16 bits, and where training stands (`resume.record`).
        """
        main, self._main = self._main, {}
        if "optimizer_states" in checkpoint:
            checkpoint[OWN_KEY] = {"main": main, "resume": resume.record(trainer, training)}

    def resumption(self, trainer: pl.Trainer, session: Session) -> Snapshot | None:
        """Return where the fit resumes; None if no checkpoint has been loaded, and in later calls."""
        loaded, self._loaded = self._loaded, None
        return None if loaded is None else resume.read(trainer, session, *loaded)

    def save_last(
        self,
        trainer: pl.Trainer,
        training: Training,
        own: dict[str, Any],
        path: Location,
        step: int,
        pieces: Collection[int],
    ) -> None:
        """Write a dying gasp: a sharded checkpoint, whatever form the others have. Collective over the default group.

        Args:
            trainer: The trainer, restored to the point that the checkpoint holds.
            training: The fit.
            own: What only this strategy reads.
            path: The directory to write.
            step: Optimizer steps that are done.
            pieces: The ranks whose parts of the shards this rank writes.
        """
        with self._sharded():
            checkpoint = {**dump_checkpoint(trainer), OWN_KEY: {"main": {}, "resume": own}}
            if own["host"]["place"] == "tail":
                resume.count_tail(checkpoint)
            self._save_sharded(training, trainer.lightning_module, checkpoint, path, Provenance(step, "gasp"), pieces)

    def save_periodic(
        self,
        trainer: pl.Trainer,
        training: Training,
        path: Location,
        written_for: str = "periodic",
        store_barrier: StoreBarrier | None = None,
    ) -> None:
        """Write a sharded checkpoint, whatever form the others have. Collective.

        Args:
            trainer: The trainer.
            training: The fit.
            path: The directory to write.
            written_for: Why the checkpoint is written: "periodic" or "planned".
            store_barrier: Used to write a copy in a thread of its own; see `settle`. None writes now.
        """
        with self._sharded():
            checkpoint = dump_checkpoint(trainer)
            self.complete(trainer, training, checkpoint)
            provenance = Provenance(checkpoint["global_step"], written_for)
            self._save_sharded(
                training, trainer.lightning_module, checkpoint, path, provenance, store_barrier=store_barrier
            )

    def settle(self, check: Callable[[], None]) -> Exception | None:
        """Wait for a checkpoint that is written beside training, and return its error. A second call returns None.

        Args:
            check: Called repeatedly; may raise.
        """
        if self._async_save is None:
            return None
        failed = self._async_save.wait(check)
        self._async_save = None
        return failed

    @contextmanager
    def _sharded(self) -> Iterator[None]:
        form, self._form = self._form, "sharded"
        try:
            yield
        finally:
            self._form = form

    def save_sharded(
        self, training: Training, module: pl.LightningModule, checkpoint: dict[str, Any], path: Location
    ) -> None:
        """Write this rank's part of a checkpoint that Lightning has put together. Collective."""
        self._save_sharded(training, module, checkpoint, path, Provenance(checkpoint["global_step"]))

    def _save_sharded(
        self,
        training: Training,
        module: pl.LightningModule,
        checkpoint: dict[str, Any],
        path: Location,
        provenance: Provenance,
        pieces: Collection[int] | None = None,
        store_barrier: StoreBarrier | None = None,
    ) -> None:
        """Write this rank's part of a sharded checkpoint, or the parts of the ranks ``pieces``. Collective."""
        from lightning_replica.checkpoint import sharded

        if pieces is None:
            training.share_buffers()
        named, shared = _named(training, module), training.shared_buffers()
        # Each rank writes some of the shared ones.
        extras = {name: shared.get(id(each), each) for name, each in named.extra_tensors.items()}
        others = {key: value for key, value in module.state_dict().items() if not isinstance(value, Tensor)}
        place = next((key for key, value in checkpoint.items() if value is self._stand_in), "state_dict")
        checkpoint, _ = made_plain(checkpoint)
        plain = {**checkpoint, place: {**checkpoint[place], **others}, "optimizer_states": [], WEIGHTS_AT: place}
        barrier = Barrier(None)
        staged = sharded.stage(
            path,
            training.state,
            replace(named, extra_tensors=extras),
            plain,
            barrier,
            ranks=pieces,
            provenance=replace(provenance, lineage=self.lineage_in(path.parent) or Lineage()),
        )
        first = pieces is None and training.groups.rank == 0

        def write(staged: sharded.Staged, barrier: Barrier) -> None:
            sharded.write(staged, barrier)
            self._published(path, first)

        if store_barrier is None:
            write(staged, barrier)
            return
        self.settle(training.check)  # an abandoned one may still write its last file
        self._async_save = AsyncSave(
            partial(write, barrier.run(staged.copied), store_barrier), lambda: store_barrier.waits
        )

    def lineage_in(self, directory: Location) -> Lineage | None:
        """Return what the last fit was in a directory; None if no callback has named that."""
        known = self._directories.get(directory)
        return None if known is None else known.lineage

    def directories_of(self, fit: int) -> int:
        """Return to how many directories a fit of the script writes, as far as its callbacks have begun."""
        return sum(each.lineage.fit == fit for each in self._directories.values())

    def publish_to(self, directory: CheckpointDirectory, keep_last: int | None, lineage: Lineage) -> None:
        """Make the tracker of ``directory`` name what is published there, and keep only the newest ``keep_last``."""
        known = self._directories.get(directory.path)
        kept = None if known is None else known.keep_last
        self._directories[directory.path] = _RunDirectory(directory, keep_last or kept, lineage)

    def report_what_is_left_out(self, trainer: pl.Trainer) -> None:
        """Say what sharded checkpoints will lack, once. On all ranks: a callback's ``state_dict`` may be collective."""
        left = left_out(trainer)
        if trainer.is_global_zero and left and left != self._reported_left_out:
            self._reported_left_out = left
            warn(
                f"checkpoints in directories hold tensors and plain data only, and lack: {'; '.join(left)}."
                " A run that starts again needs none of it. `save_hyperparameters(ignore=[...])` leaves hyperparameters"
                " out everywhere; for `load_from_checkpoint`, pass them as arguments."
            )

    def _published(self, path: Location, first: bool) -> None:
        """Track a checkpoint that is whole on the disk, on one rank. A failure here is no reason to write it again."""
        found = self._directories.get(path.parent)
        if found is None or not first:
            return
        try:
            found.directory.track(path.name)
            if found.keep_last is not None:
                found.directory.retain(found.keep_last, found.lineage)
        except (CheckpointError, OSError) as error:
            warn(f"{path} is written, but updating the tracker or removing older checkpoints failed: {error}")

    # Loading, in the order of calls

    def open(self, path: Location, fitting: bool) -> dict[str, Any] | None:
        """Return what a sharded checkpoint holds beside shards, or all of it outside of a fit; None for a full one."""
        if not storage_of(path).may_be_sharded():
            return None
        from lightning_replica.checkpoint.export import read_whole
        from lightning_replica.checkpoint.sharded import read_plain

        if not fitting:
            return read_whole(path)
        self._directory = path
        plain = read_plain(path)
        if plain.pop(WEIGHTS_AT, "state_dict") == "state_dict":
            return plain
        return read_whole(path, optimizers=False)  # the hook that has moved the weights expects to see them

    @property
    def is_open(self) -> bool:
        """Whether a sharded checkpoint is open, whose weights are loaded with the optimizers."""
        return self._directory is not None

    def load_optimizers(self, training: Training, module: pl.LightningModule, checkpoint: Mapping[str, Any]) -> None:
        """Load every optimizer's part of the checkpoint and, if the checkpoint is sharded, the weights.

        Raises:
            ConfigurationError: If the checkpoint is another model's.
        """
        own = checkpoint.get(OWN_KEY, {}).get("resume", {})
        if checkpoint.get("loops"):
            self._loaded = checkpoint["loops"]["fit_loop"], own
            _train_the_same(module, own.get("host", {}).get("requires_grad", ()))
        training.state.follow_groups()
        directory, self._directory = self._directory, None
        if directory is not None:
            _load_shards(training, module, directory)
            return
        saved = checkpoint["optimizer_states"]
        if len(saved) != len(training.state.optimizers):
            raise ConfigurationError(
                f"The checkpoint holds the state of {len(saved)} optimizers, but this model has"
                f" {len(training.state.optimizers)}. It was written for another `configure_optimizers`."
            )
        main = checkpoint.get(OWN_KEY, {}).get("main", {})
        for number, state in enumerate(saved):
            training.state.load_optimizer(number, state, main.get(number))


def _train_the_same(module: pl.LightningModule, trained: Sequence[bool]) -> None:
    """Freeze parameters as in the run that wrote the checkpoint: the hook that froze them is not called again."""
    parameters = list(module.named_parameters())
    if len(parameters) != len(trained):
        return  # another strategy's, or another model's, which is refused elsewhere
    for (name, parameter), was in zip(parameters, trained, strict=True):
        if parameter.requires_grad != was:
            log.info("%s is %s, as in the checkpoint", name, "trained" if was else "frozen")
            parameter.requires_grad_(was)


def _load_shards(training: Training, module: pl.LightningModule, directory: Location) -> None:
    from lightning_replica.checkpoint import sharded

    sharded.load_sharded(directory, training.state, _named(training, module))


def _named(training: Training, module: pl.LightningModule) -> NamedModel:
    """Return the rank's part of the model, by the names of a checkpoint."""
    from lightning_replica.checkpoint import sharded

    part = training.part
    extras, aliases = sharded.untrained_tensors_of(module, training.state)
    return NamedModel(
        [part.named(name) for name, _ in module.named_parameters()],
        part.all_named(extras),
        {part.named(alias): part.named(name) for alias, name in aliases.items()},
        part.names,
        part.whole(),
    )


def weights_of_part(path: Location, part: ModelPart, module: pl.LightningModule, read: Mapping[str, Any]) -> Any:
    """Return the state dict of a rank's part of the model, from a sharded checkpoint.

    Args:
        path: The checkpoint.
        part: The part.
        module: Its module.
        read: All tensors of the checkpoint, by their names there.
    """
    from lightning_replica.checkpoint.contents import TensorInfo
    from lightning_replica.checkpoint.resharding import read_weights

    first: dict[int, str] = {id(parameter): name for name, parameter in module.named_parameters()}
    state = module.state_dict(keep_vars=True)
    firsts = {name: first.setdefault(id(each), name) for name, each in state.items() if isinstance(each, Tensor)}
    infos = {name: TensorInfo.of(state[name].detach().contiguous()) for name in {*firsts.values()} & state.keys()}
    found = read_weights(path, part.names, part.all_named(infos), part.whole())
    if found is None:
        weights = part.own(read)
    else:
        own = part.own(found)
        weights = {name: own[of] for name, of in firsts.items()}
    return {**{name: each for name, each in state.items() if name not in firsts}, **weights}


def absent(path: Location) -> dict[str, Any]:
    """Return what a replacement loads for a checkpoint that is gone by now. Its state comes from a peer."""
    nothing: dict[str, Any] = {"state_dict": {}, "optimizer_states": [], "lr_schedulers": [], "callbacks": {}}
    return {**nothing, "pytorch-lightning_version": pl.__version__, "path": str(path)}


def is_absent(checkpoint: Mapping[str, Any]) -> bool:
    """Return whether this is what `absent` returns."""
    return not checkpoint.get("state_dict") and "path" in checkpoint
