"""The host state of a rank as recovery uses it: snapshots that are taken, sent, adopted and restored."""

import hashlib
import json
import logging
from dataclasses import asdict, replace
from typing import Any

from torch import nn

from lightning_replica._compat.lightning import epoch_of
from lightning_replica._compat.lightning_names import _call_strategy_hook, _set_sampler_epoch, pl
from lightning_replica._compat.torch import mark_stepped
from lightning_replica._compat.tree import Tree
from lightning_replica.core import plain
from lightning_replica.core.inexact import Inexact
from lightning_replica.core.ranges import ranged
from lightning_replica.core.recoverable import Kind
from lightning_replica.devices.interface import Device
from lightning_replica.errors import RecoveryError
from lightning_replica.sharding.engine import Engine
from lightning_replica.state import builds, data_setup, param_groups, trainer_state
from lightning_replica.state.data.in_loops import training_fetches, training_loaders, validation_loaders
from lightning_replica.state.data.inputs import Shadow
from lightning_replica.state.frozen import FrozenCopies
from lightning_replica.state.metrics import from_plain, to_plain
from lightning_replica.state.module_buffers import BufferCopies
from lightning_replica.state.objects.tracked import LEFT_OUT, Taken
from lightning_replica.state.snapshot import ForReplacement, Snapshot, pack_for_replacement, unpack_on_replacement
from lightning_replica.state.structure import Original, Outline, Structure, Tables, differences, follow, form_of

log = logging.getLogger(__name__)

_OUTPUT_BYTES = 2**26  # of what a training step returns


class LightningHostState:
    """The `core.recoverable.HostState` of a Trainer.

    Args:
        trainer: The trainer that fits.
        state: The sharded state. Parameters that it does not hold are sent with the host state.
        device: The device that this rank trains on.
        inexact: Gets what is not restored exactly.
        shows_outputs: Whether user code may look at what a training step has returned.

    Attributes:
        resume: Where the fit loop resumes; set by `restore`.
    """

    def __init__(
        self, trainer: pl.Trainer, state: Engine, device: Device, inexact: Inexact, shows_outputs: bool = True
    ) -> None:
        self._trainer, self._state, self._device, self._inexact = trainer, state, device, inexact
        self._shows_outputs = shows_outputs
        self._copies = trainer_state.Copies(trainer, inexact.report)
        self._frozen = FrozenCopies(self._trained, inexact.report)
        self._original = Original(trainer.lightning_module)
        self._original_outline = self.outline()
        self._outlined: tuple[list[Any], bytes] = [], b""
        self._outlined_tables: list[Tables] | None = None
        self._outlined_classes: list[type] = []
        self._held: dict[tuple[Kind, int], Snapshot] = {}
        self._output: tuple[int, dict[str, Any]] = (-1, {})
        self._passed = -1
        self._differing: builds.Differing = {}
        self._expected: dict[str, str] = {}  # the signature that this replacement should have
        self._adopted = False  # whether the snapshot came from another process
        self.resume: Snapshot | None = None

    # Taking

    def begin_to_save(self) -> None:
        """Leave out of checkpoints what objects hold now, before anything is loaded and before the first batch."""
        self._copies.reachable.begin_to_save(self._reached())

    def _reached(self) -> Taken:
        return self._copies.reachable.take(Tree.of(self._trainer.lightning_module), window=False)

    def saved(self, taken: Snapshot) -> Snapshot:
        """Return a snapshot with what belongs in a checkpoint of the objects of the user, instead of what is mirrored.

        Called when the shard is at the snapshot's step.
        """
        reached = taken.local.reached if taken.local.reached.capture.roots else self._reached()
        objects = self._copies.reachable.saved(reached)
        attributes = self._state.own_attributes()
        private = replace(
            taken.private,
            objects=plain.pack(objects) if objects else b"",
            attributes=plain.pack(attributes) if any(attributes) else b"",
            frozen=b"",
            outline=b"",
        )
        return replace(taken, private=private)

    def own_buffers(self) -> tuple[bool, bytes]:
        """Return, for a checkpoint, whether shared buffers are due, and what this rank has instead of them, packed."""
        self.buffers.take(Tree.of(self._trainer.lightning_module).buffers, window=False)
        return self.buffers.due, self.buffers.packed()

    def begin(self, loaded: Snapshot | None) -> Snapshot:
        """Take the snapshot of the tail before the first step, when the fit has not begun or not resumed ``loaded``."""
        taken = self._take("tail", 0)
        taken.private.fresh = True
        if loaded is not None:
            own, theirs = taken.private, loaded.private
            own.loaders, own.fetching = theirs.loaders, theirs.fetching
            own.loss, own.extras = theirs.loss, theirs.extras
            taken.local.batch, taken.local.output = loaded.local.batch, loaded.local.output
            if loaded.replicated.point is not None:  # the rest of it has been loaded
                taken.replicated.point = replace(loaded.replicated.point, modules=None, outline=None, gradients=b"")
        if self._trainer.is_global_zero:
            self._warn_of(taken)
        return self._keep(taken)

    def outline(self) -> Outline:
        """Return what the model consists of now."""
        return Outline.of(self._trainer.lightning_module, self._original)

    def signature(self, taken: Snapshot) -> dict[str, str]:
        """Return how the objects of the user's are built; see `Reachable.signature`."""
        return self._copies.reachable.signature(taken.local.reached)

    def set_differing(self, differing: builds.Differing) -> None:
        """Set in what this rank's objects differ from those of its peers; see `builds.differing`."""
        self._differing = differing

    def _warn_of(self, taken: Snapshot) -> None:
        """Warn if ``taken`` cannot be sent: a warning now is better than one when a rank is lost."""
        try:
            pack_for_replacement(taken.replicated, ForReplacement())
        except RecoveryError as error:
            log.warning("%s", error)

    def window(self, step: int) -> Snapshot | None:
        """Return the snapshot of the window that leads from ``step`` to the next; None if that has not begun."""
        return self._held.get(("batch", step))

    def kept(self, kind: Kind, step: int) -> Snapshot:
        """Return one of the snapshots that `held` names."""
        return self._held[kind, step]

    def outputs(self, step: int) -> tuple[list[Any] | None, bytes]:
        """Return what the training step that led to ``step`` has returned: the loss, and the rest, as in a snapshot.

        The loss is None if it is not known.
        """
        tail = self._held.get(("tail", step))
        if tail is not None:
            return tail.private.loss, tail.private.extras
        noted, output = self._output
        return (to_plain(output.get("loss")), self._extras_of(output)) if noted == step else (None, b"")

    def pass_window(self, step: int) -> None:
        """Note that a batch window begins without a snapshot, because none is wanted."""
        self._mark()
        self._held.clear()
        self._passed = step

    def is_past(self, step: int) -> bool:
        """Return whether the window that leads from ``step`` to the next has begun without a snapshot."""
        return self._passed == step

    def pass_commit(self, step: int, output: dict[str, Any]) -> None:
        """Note the outputs before the commit that leads to ``step``: no snapshot is wanted, but a checkpoint may be."""
        self._output = (step, output if self._shows_outputs else {"loss": output.get("loss")})

    @ranged("snapshot_batch")
    def begin_window(self, step: int, whole: bool = False) -> Snapshot:
        """Take the snapshot of a batch window that begins, and drop those of earlier steps: nobody needs them again.

        Args:
            step: The step before the window.
            whole: Whether the run will end here, so that everything must be compared, whatever its size.
        """
        self._mark()
        self._held = {key: kept for key, kept in self._held.items() if key[1] >= step}
        return self._keep(self._take("batch", step, whole))

    def _mark(self) -> None:
        training_fetches(self._trainer).mark(trainer_state.fetched_ahead(self._trainer))

    def closure_output(self) -> dict[str, Any]:
        """Return what the closure of automatic optimization has returned."""
        optimization: Any = self._trainer.fit_loop.epoch_loop.automatic_optimization
        output: dict[str, Any] = optimization.output()
        return output

    @ranged("snapshot_tail")
    def enter_commit(self, step: int, output: dict[str, Any]) -> Snapshot:
        """Take a snapshot before the commit that leads to ``step``; ``output`` is the result of the training step."""
        epoch_loop: Any = self._trainer.fit_loop.epoch_loop
        taken = self._take("tail", step)
        taken.local.batch, taken.local.output = epoch_loop._results.batch, output
        taken.private.loss, taken.private.extras = to_plain(output.get("loss")), self._extras_of(output)
        return self._keep(taken)

    def _extras_of(self, output: dict[str, Any]) -> bytes:
        """Pack what a training step has returned beside the loss, for a replacement's `on_train_batch_end`."""
        packed, size = {}, 0
        for name, value in output.items() if self._shows_outputs else ():
            if name == "loss":
                continue
            try:
                each = plain.pack(value)
            except plain.NotPlainError as error:
                self._inexact.report(
                    f"outputs[{name!r}] of `on_train_batch_end`", f"it is not mirrored: {error}", "replacement"
                )
                continue
            size += len(each)
            if size <= _OUTPUT_BYTES:
                packed[name] = each
            else:
                self._inexact.report(
                    f"outputs[{name!r}] of `on_train_batch_end`",
                    "it is too large to be mirrored in every step",
                    "replacement",
                )
        return plain.pack(packed) if packed else b""

    @property
    def buffers(self) -> BufferCopies:
        """The copies of the module's buffers."""
        return self._copies.buffers

    def _parameters(self) -> dict[str, nn.Parameter]:
        if len(self._trained()) == len(self._copies.tree.parameters if self._copies.tree else ()):
            return {}
        return dict(self._trainer.lightning_module.named_parameters())

    def _take(self, kind: Kind, step: int, whole: bool = False) -> Snapshot:
        with self._device.fence:  # a copy that was interrupted would pass for a complete one
            taken = trainer_state.take(self._trainer, self._device, kind, step, self._copies, whole)
            if taken.local.structure is not None:
                taken.local.frozen = self._frozen.take(self._parameters(), kind == "batch", whole)
                taken.private.frozen = self._frozen.packed()
                taken.private.outline = self._packed_outline(taken.local.structure)
            return taken

    def _packed_outline(self, structure: Structure) -> bytes:
        """Return the outline as it is mirrored: a digest, and all of it once it is another than when the fit began."""
        classes = [*map(type, structure.tree.modules)]
        if structure.tables is not self._outlined_tables or classes != self._outlined_classes:
            form = [classes, form_of(structure, self._original)]
            if form != self._outlined[0]:
                outline = self.outline()
                now = None if outline == self._original_outline else asdict(outline)
                self._outlined = form, plain.pack([_digest_of(outline), now])
            self._outlined_tables, self._outlined_classes = structure.tables, classes
        return self._outlined[1]

    def _follow(self, taken: Snapshot, of_peer: Outline) -> None:
        """Give the model what the predecessor's consisted of."""
        digest, own = plain.unpack(taken.private.outline)
        buffers = {**taken.replicated.whole().buffers, **taken.local.buffers}
        if own is not None:
            follow(self._trainer.lightning_module, Outline(**own), buffers, self._original)
        elif digest == _digest_of(of_peer):
            follow(self._trainer.lightning_module, of_peer, buffers, self._original)
        elif digest != _digest_of(self.outline()):
            why = "it consisted of other parts on this rank than on others, and not of those that the script gives it"
            self._inexact.report("module", why, "once")

    def _trained(self) -> list[nn.Parameter]:
        return self._state.trained

    def _keep(self, taken: Snapshot) -> Snapshot:
        self._held[taken.kind, taken.step] = taken
        return taken

    def result(self) -> tuple[Outline, bytes, bytes]:
        """Return the result of the training loop that has just ended: its outline, its replicated and its private part.

        Raises:
            RecoveryError: If the result holds a value that cannot be sent.
        """
        taken = self._take("tail", 0)
        of_peer = ForReplacement(plain.pack(self._copies.reachable.whole(taken.local.reached)))
        return self.outline(), pack_for_replacement(taken.replicated, of_peer), bytes(taken.private.pack())

    def adopt_result(self, replicated: bytes, private: bytes) -> None:
        """Restore what `result` returned in earlier processes; the weights are in place already."""
        taken, of_peer = unpack_on_replacement("tail", 0, replicated, private)
        self._join_sent(taken, of_peer.objects)
        self._put_groups(taken)
        for optimizer in self._trainer.optimizers:
            mark_stepped(optimizer)
        trainer_state.restore(self._trainer, taken, self._copies)
        self._device.set_rng_state(taken.private.rng)

    # core.recoverable.HostState

    def held(self, kind: Kind) -> tuple[int, ...]:
        """Return the steps of the snapshots of ``kind`` that this rank holds."""
        return tuple(step for of_kind, step in self._held if of_kind == kind)

    def export(self, kind: Kind, step: int) -> bytes:
        """Return the replicated part of a snapshot, with the parameters that no shard holds."""
        taken = self._held[kind, step]
        of_peer = ForReplacement(
            objects=plain.pack(self._copies.reachable.whole(taken.local.reached)),
            frozen=self._frozen.export(dict(self._trainer.lightning_module.named_parameters())),
            signature=self.signature(taken),
            differing=self._differing,
            outline=asdict(self.outline()),
        )
        return pack_for_replacement(taken.replicated, of_peer)

    settings_advice = (
        "Schedulers on all ranks must follow the same numbers: log the metric that a scheduler follows with"
        " `self.log(..., sync_dist=True)`."
    )

    def settings(self, step: int) -> dict[str, str]:
        """Return the hyperparameters of all param groups, from the snapshot of the tail that leads to ``step``."""
        return param_groups.hyperparameters(self._held["tail", step].replicated.whole().groups)

    def private(self, kind: Kind, step: int) -> plain.Pieces:
        """Return the private part of a snapshot, which is mirrored."""
        return self._held[kind, step].private.pack()

    def adopt(self, kind: Kind, step: int, replicated: bytes, private: bytes) -> None:
        """Adopt the snapshot that a peer sent as this rank's own."""
        self._held, self._adopted = {}, True
        taken, of_peer = unpack_on_replacement(kind, step, replicated, private)
        self._keep(taken)
        module = self._trainer.lightning_module
        self._follow(taken, Outline(**of_peer.outline))
        taken.local.structure = Structure.of(Tree.of(module))
        with self._device.fence:
            self._frozen.adopt(dict(module.named_parameters()), of_peer.frozen, bytes(taken.private.frozen))
        self._join_sent(taken, of_peer.objects)
        self._expected = builds.expected(of_peer.signature, of_peer.differing, self._differing)
        self._put_groups(taken)
        for optimizer in self._trainer.optimizers:
            mark_stepped(optimizer)

    def _join_sent(self, taken: Snapshot, of_peer: bytes | None) -> None:
        """Put what a peer's objects held before what the predecessor's held, where that was too large to be mirrored.

        What the predecessor had not changed, the script has built.
        """
        left = _left_out_of(taken)
        whole = [] if of_peer is None else plain.unpack(of_peer, placed=True)
        whole = [[root, [pair for pair in pairs if f"{root}.{pair[0]}" in left]] for root, pairs in whole]
        taken.local.sent = (whole, *taken.local.sent)

    def restore_groups(self, kind: Kind, step: int) -> None:
        """Restore the param groups before shards move, and drop all other snapshots; see `HostState.restore_groups`."""
        self._held = {key: kept for key, kept in self._held.items() if key == (kind, step)}
        taken = self._held[kind, step]
        self._put_model(taken)

    def _put_model(self, taken: Snapshot) -> None:
        """Restore what the module and the optimizers consist of, and parameters that no shard holds."""
        local = taken.local
        if local.structure is not None:
            tensors = (tensor for _, tensor in local.reached.capture.tensors())
            local.structure.put_back(self._trainer.lightning_module, tensors)
        self._frozen.put_back(local.frozen)
        self._put_groups(taken)

    def _put_groups(self, taken: Snapshot) -> None:
        replicated = taken.replicated
        param_groups.put_back(self._trainer, replicated.progress.requires_grad, replicated.whole().groups)

    def restore(self, kind: Kind, step: int) -> None:
        """Restore all host state from a snapshot, and set `resume`, so that the fit loop resumes there."""
        taken = self._held[kind, step]
        with self._device.fence:  # see `_take`; likewise, a value whose restoring was interrupted would stay as it is
            trainer_state.restore(self._trainer, taken, self._copies)
            if taken.local.sent:
                self._make_own(taken)
        data_setup.put_back(self._trainer, taken.private.data_setups)
        self._rewind(taken)
        for loader, state in zip(validation_loaders(self._trainer), taken.private.validation, strict=False):
            (loader.inherit if self._adopted else loader.return_to)(state)
        self._put_data(taken)
        self._adopted = False
        self._device.set_rng_state(taken.private.rng)
        self.resume = taken

    def put_back(self, taken: Snapshot) -> None:
        """Restore the trainer from a snapshot, but for generators and data."""
        trainer_state.restore(self._trainer, taken, self._copies)

    def return_to(self, taken: Snapshot) -> None:
        """Restore everything but the data from a tail's snapshot, inside of the hook in which it was taken."""
        module, results = self._trainer.lightning_module, self._trainer.fit_loop.epoch_loop._results
        hook = module._current_fx_name
        with self._device.fence:
            self._put_model(taken)
            self.put_back(taken)
        module._current_fx_name, results.batch = hook, taken.local.batch
        self._device.set_rng_state(taken.private.rng)

    def _make_own(self, taken: Snapshot) -> None:
        """Turn what a peer has sent into this rank's own copies, which may be sent on to other ranks."""
        module = self._trainer.lightning_module
        taken.local.reached, taken.local.sent = self._copies.reachable.take(Tree.of(module)), ()
        taken.private.objects = self._copies.mirrored(taken.local.reached)
        self._copies.reachable.compare(taken.local.reached, self._expected)
        self._frozen.renew()
        taken.local.frozen = self._frozen.take(dict(module.named_parameters()), window=False)

    def load(self, taken: Snapshot) -> None:
        """Begin this fit at a snapshot that a checkpoint held."""
        private, point = taken.private, taken.replicated.point
        if point is not None and point.outline is not None:
            for name, why in differences(Outline(**point.outline), self.outline()).items():
                self._inexact.report(f"module.{name}", why, "once")
        for name in _left_out_of(taken):
            self._inexact.report(name, "it was too large for the checkpoint from which this fit resumes", "once")
        self._state.set_own_attributes(plain.unpack(private.attributes) if private.attributes else [])
        if taken.replicated.components is not None:
            trainer_state.restore(self._trainer, taken, self._copies, same_fit=False)
        else:
            trainer_state.restore_progress(self._trainer, taken)
            for sent in taken.local.sent:
                self._copies.reachable.put_sent(sent)
            self.buffers.load(Tree.of(self._trainer.lightning_module).buffers, taken.local.buffers)
            self.buffers.due = taken.replicated.buffers_due
        if taken.place in ("batch", "tail", "batch_end", "validation_end"):
            self._rewind(taken)
        else:
            self._inherit(taken)
        for loader, state in zip(validation_loaders(self._trainer), private.validation, strict=False):
            loader.inherit(state)
        self._put_data(taken)
        self._device.set_rng_state(private.rng)

    def _put_data(self, taken: Snapshot) -> None:
        """Restore what datasets with workers keep in this process, after the workers have started."""
        for loader, state in (
            *zip(training_loaders(self._trainer), taken.private.loaders, strict=False),
            *zip(validation_loaders(self._trainer), taken.private.validation, strict=False),
        ):
            loader.put_content(state)

    def _inherit(self, taken: Snapshot) -> None:
        """Put the data between two epochs, where the iteration of the next one may have begun already."""
        loaders = training_loaders(self._trainer)
        for loader, state in zip(loaders, taken.private.loaders, strict=False):
            if state.begun is not None and not state.batches:
                loader.rewind(state)
            else:
                loader.inherit(state)
        if any(state.begun is not None and not state.batches for state in taken.private.loaders):
            training_fetches(self._trainer).expect(taken.private.fetching)
            fetcher: Any = self._trainer.fit_loop._data_fetcher
            iter(fetcher)

    def _rewind(self, taken: Snapshot) -> None:
        """Put the data back; if hooks still have to see the previous batch, fetch that again."""
        fit_loop = self._trainer.fit_loop
        epoch = epoch_of(fit_loop)
        for loader in training_loaders(self._trainer):
            _set_sampler_epoch(loader, epoch)
        training_fetches(self._trainer).rewind(taken.private.loaders, taken.private.fetching)
        fetcher: Any = fit_loop._data_fetcher
        iter(fetcher)
        again = taken.ends_with_batch
        fetcher.fetched = fit_loop.epoch_loop.batch_progress.current.ready - again
        if again:
            item = next(fetcher)
            batch, _, _ = item if isinstance(item, tuple) else next(item)  # `training_step(dataloader_iter)`
            if taken.local.batch is None:
                taken.local.batch = self._transfer(batch)
                taken.local.output = self._output_of(taken)
        if fetcher.length is not None:
            fetcher.done = fetcher.fetched >= fetcher.length

    def _output_of(self, taken: Snapshot) -> dict[str, Any]:
        """Return what the training step has returned in another process."""
        loss = from_plain(taken.private.loss, self._trainer.lightning_module.device)
        extras = plain.unpack(taken.private.extras) if taken.private.extras else {}
        output = {} if loss is None else {"loss": loss}
        return {**output, **{name: plain.unpack(each, placed=True) for name, each in extras.items()}}

    def _transfer(self, batch: Any) -> Any:
        """Do to a batch what Lightning's training loop does before its hooks see it."""
        if isinstance(batch, Shadow):
            return batch
        batch = self._trainer.precision_plugin.convert_input(batch)
        batch = self._trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        return _call_strategy_hook(self._trainer, "batch_to_device", batch, dataloader_idx=0)


def _digest_of(outline: Outline) -> str:
    return hashlib.sha256(json.dumps(asdict(outline)).encode()).hexdigest()


def _left_out_of(taken: Snapshot) -> set[str]:
    """Return the names of what another process has left out, because it was too large."""
    return {name for sent in taken.local.sent for root, names in sent if root == LEFT_OUT for name in names}
