"""Saving and loading of sharded checkpoints; loading works into any number of ranks and replicas, and any partition.

    <path>/
      manifest.json    what the directory holds: sizes, checksums, versions (`publish`)
      plain.pt         other data that the caller saves with it
      contents.pt      shapes, hyperparameters, single numbers of the optimizer state (`contents`)
      .metadata        which elements lie where, by PyTorch Distributed Checkpoint (DCP)
      __<i>_0.distcp   the elements that writer i wrote

The tensors are ``model.<name>``, ``main.<name>`` (32-bit main parameters where parameters have 16 bits) and
``optimizer.<number>.<key>.<name>``. See [Note: flat tensors] in `chunks`.
"""

import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_replica._compat.dtensor import local_of
from lightning_replica.checkpoint import contents as stored
from lightning_replica.checkpoint import coverage, publish, verification
from lightning_replica.checkpoint.barrier import Barrier
from lightning_replica.checkpoint.chunks import Chunk, ChunkReader, write_chunks, write_metadata
from lightning_replica.checkpoint.contents import (
    CONTENTS,
    PLAIN,
    Contents,
    StateInfo,
    as_bytes,
    check_model,
    merged,
    of_part,
    read_contents,
)
from lightning_replica.checkpoint.coverage import METADATA
from lightning_replica.checkpoint.location import Given, Location, locate
from lightning_replica.checkpoint.manifest import FileInfo, Manifest, Provenance
from lightning_replica.checkpoint.named_model import NamedModel
from lightning_replica.checkpoint.reads import Reads
from lightning_replica.checkpoint.resharding import Resharding
from lightning_replica.checkpoint.sources import Boxes, Sources, is_needed
from lightning_replica.checkpoint.storage import Files
from lightning_replica.checkpoint.which_storage import storage_of
from lightning_replica.checkpoint.writes import Writes, describe, group_names, weights_of
from lightning_replica.core.points import reach
from lightning_replica.errors import CheckpointError
from lightning_replica.sharding.engine import Checkpointable


@dataclass(frozen=True)
class Staged:
    """All that one rank writes of a checkpoint. `stage` makes it, and `write` writes it.

    Attributes:
        path: The directory to write, or its URL.
        chunks: The tensors.
        files: Content of other files, by name. Empty on all ranks but rank 0 of the group.
        contents: What the checkpoint will hold. None on all ranks but rank 0 of the group.
        rank: This rank in the world.
        described: The checkpoint's manifest, without its files and writers, which are known after writing only.
    """

    path: Location
    chunks: tuple[Chunk, ...]
    files: Mapping[str, bytes]
    contents: Contents | None
    rank: int
    described: Manifest

    def copied(self) -> "Staged":
        """Return a copy in memory of its own, which training does not change."""
        return replace(self, chunks=tuple(replace(each, data=each.data.cpu().clone()) for each in self.chunks))


def save_sharded(
    path: Given,
    state: Checkpointable,
    model: NamedModel,
    plain: Mapping[str, Any],
    *,
    group: dist.ProcessGroup | None = None,
    ranks: Collection[int] | None = None,
    provenance: Provenance = Provenance(),  # noqa: B008
) -> None:
    """Write a checkpoint, every element once, all ranks in parallel. Collective.

    At every instant ``path`` is what it was before, or the whole new checkpoint. `publish`, or `attempts` for a URL,
    describes what a crash leaves. When this returns on any rank, the checkpoint is published. The arguments are those
    of `stage`.

    Raises:
        CheckpointError: On every rank of the group, if any rank failed. A checkpoint published before stays.
    """
    barrier = Barrier(group)
    write(stage(path, state, model, plain, barrier, ranks=ranks, provenance=provenance), barrier)


def stage(
    path: Given,
    state: Checkpointable,
    model: NamedModel,
    plain: Mapping[str, Any],
    barrier: Barrier,
    *,
    ranks: Collection[int] | None = None,
    provenance: Provenance = Provenance(),  # noqa: B008
) -> Staged:
    """Find out what this rank writes. Collective. This writes nothing and copies no tensors.

    Args:
        path: The directory to write, or its URL.
        state: The sharded state.
        model: The rank's model, or its part of it.
        plain: Other tensors and plain data to save. Rank 0 of the group writes them.
        barrier: The barrier of the ranks that save.
        ranks: The ranks whose pieces this rank writes; None means its own. If only survivors save, one of them also
            writes the pieces of a lost peer. The group as a whole must write the pieces of every rank once.
        provenance: What the checkpoint says of itself.

    Raises:
        CheckpointError: On every rank of the group, if the arguments cannot be saved.
    """
    writes, parts, extra_tensors = Writes(), model.parts, model.extra_tensors

    def prepare() -> tuple[Sequence[str], int, list[dict[str, StateInfo]]]:
        weights_of(state, model.names, extra_tensors)
        writes.add_pieces(state, model.names, {state.rank} if ranks is None else ranks)
        return parts, state.grid.size, writes.state

    prepared = barrier.all(prepare)
    sharers = {part: [rank for rank, (each, *_) in enumerate(prepared) if part in each] for part in parts}
    sizes = {each[0]: size for each, size, _ in prepared}  # of the grids that together have all ranks

    def describe_parts() -> list[Contents]:
        """Describe the parts of the model of which this rank is the first that has them."""
        described = []
        for part in parts:
            if barrier.rank == sharers[part][0]:
                own = [prepared[rank][2] for rank in sharers[part]]
                weights = weights_of(state, model.names, extra_tensors)
                found = describe(state, weights, model.aliases, model.names, own, model.whole)
                described.append(found.of_parts(part))
        return described

    of_parts = barrier.all(describe_parts) if parts[0] else None  # the whole model is described where it is written

    def pack() -> tuple[dict[str, bytes], Contents | None]:
        for part in parts:
            writes.add_extras(of_part(extra_tensors, part), sharers[part].index(barrier.rank), len(sharers[part]))
        if barrier.rank != 0:
            return {}, None
        described = [describe_parts()] if of_parts is None else of_parts
        contents = merged([part for each in described for part in each])
        files = {
            PLAIN: as_bytes(plain, "the state beside the weights"),
            CONTENTS: as_bytes(contents.as_plain(), "the optimizers' state"),
        }
        return files, contents

    files, found = barrier.run(pack)
    grid, partition = state.grid, state.settings.partition
    described = Manifest(
        files={},
        world_size=sum(sizes.values()),
        replicas=grid.replicas,
        partition=partition,
        step=provenance.step,
        written_for=provenance.written_for,
        lineage=provenance.lineage,
    )
    return Staged(locate(path), tuple(writes.chunks), files, found, state.rank, described)


def write(staged: Staged, barrier: Barrier) -> None:
    """Write and publish what was staged. Collective over the ranks that staged it.

    Raises:
        CheckpointError: On every rank, if any rank failed. A checkpoint published before stays.
    """
    to = storage_of(staged.path).destination()

    def write_part() -> tuple[int, str, dict[str, FileInfo], bytes]:
        for name, content in staged.files.items():
            publish.write_file(to.directory / name, content)
        written = write_chunks(to.directory, staged.chunks, barrier.rank, to.durable)
        files = {**written.files, **{name: FileInfo.of_bytes(content) for name, content in staged.files.items()}}
        to.deliver([to.directory / name for name in files])
        reach("save")
        return staged.rank, socket.gethostname(), files, written.part

    def publish_it() -> None:
        if staged.contents is None:
            return
        metadata = write_metadata(to.directory, [part for *_, part in everyone], to.durable)
        files = {name: info for _, _, each, _ in everyone for name, info in each.items()}
        files[METADATA] = FileInfo.of(to.directory / METADATA)
        writers = {rank: host for rank, host, _, _ in everyone}
        manifest = replace(staged.described, files=files, writers=writers)
        problem = coverage.problem_of(metadata, manifest, staged.contents)
        if problem is not None:
            raise CheckpointError(f"{staged.path} is not written, because it would not be whole: {problem}.")
        to.deliver([to.directory / METADATA])
        to.publish(manifest)

    with to:
        to.join(barrier.all(lambda: to.begin(first=barrier.rank == 0))[0])
        everyone = barrier.all(write_part)
        barrier.run(publish_it)


def load_sharded(path: Given, state: Checkpointable, model: NamedModel, group: dist.ProcessGroup | None = None) -> None:
    """Read a checkpoint into parameters, main parameters, optimizers and extra tensors, in place. Collective.

    Each rank reads all weights, and of the rest only what its shard needs. Optimizers get their state through their own
    ``load_state_dict``. The checksum of each file is computed once, by one rank.

    Args:
        path: The directory, or its URL.
        state: The sharded state, with any number of ranks and replicas, and any partition.
        model: The rank's model, or its part of it. If the checkpoint was written by ranks with other parts, the model
            must say where its tensors lie in the whole one.
        group: The ranks that load; None means the default group.

    Raises:
        CheckpointError: On every rank of the group. If the checkpoint is damaged or of another model, nothing has
            changed yet. If a rank could not read, some of the state may have changed.
    """
    barrier = Barrier(group)
    boxes, parts, names, extra_tensors = model.whole.boxes, model.parts, model.names, model.extra_tensors

    def check() -> tuple[Files, Manifest, Contents, Sources | None]:
        directory = verification.published(locate(path))
        manifest = verification.verify(directory, share=(barrier.rank, barrier.size))
        contents = read_contents(directory)
        coverage.check(directory, manifest, contents)
        weights, groups = weights_of(state, names, extra_tensors), group_names(state, names)
        if not is_needed(contents, parts, weights, boxes):
            check_model(contents.of_parts(*parts), weights, groups)
            return directory, manifest, contents, None
        sources = Sources(contents, parts, weights, boxes)
        sources.check_groups(groups)
        return directory, manifest, contents, sources

    directory, manifest, contents, sources = barrier.run(check)
    keys = {key for each in barrier.all(lambda: _keys_of(boxes)) for key in each}
    barrier.run(lambda: None if sources is None else sources.refuse_unread(keys))

    @torch.no_grad()
    def read() -> None:
        reader = ChunkReader(directory, manifest.files)
        reads: Reads | Resharding = Reads(contents, reader) if sources is None else Resharding(sources, reader)
        reads.values(state, names)
        reads.extras(extra_tensors)
        states = [reads.state(number, sharded, names) for number, sharded in enumerate(state.optimizers)]
        reads.run()
        for sharded, found, groups in zip(state.optimizers, states, reads.groups(state), strict=True):
            sharded.load_state(found, groups)

    barrier.run(read)


def _keys_of(boxes: Boxes) -> list[str]:
    """Return the tensors of the whole model of which a rank has a part."""
    return sorted({box.key for each in boxes.values() for box in each})


def read_plain(path: Given | Files) -> dict[str, Any]:
    """Return what was saved as ``plain``. Needs no other rank.

    Raises:
        CheckpointError: If the manifest or the file with plain data is damaged. `load_sharded` checks the tensors.
    """
    return stored.read_plain(verification.published(path if isinstance(path, Files) else locate(path)), PLAIN)


def untrained_tensors_of(module: nn.Module, state: Checkpointable) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Find what a checkpoint of ``module`` holds beside the trained parameters.

    Returns:
        The tensors of the module's state dict that are frozen, in no optimizer, or buffers. Also, for every further
        name of a tensor, its first name, which for a parameter is the one in ``named_parameters``.
    """
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    trained = {id(parameter) for parameter in state.trained}
    extra_tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            continue
        if first.setdefault(id(tensor), name) != name:
            aliases[name] = first[id(tensor)]
        elif id(tensor) not in trained:
            extra_tensors[name] = local_of(tensor)
    return extra_tensors, aliases
