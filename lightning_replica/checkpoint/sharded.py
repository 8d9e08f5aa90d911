"""Saving and loading a sharded checkpoint: into any other number of ranks, replicas, and partition.

    <path>/
      manifest.json    what the directory holds: sizes, checksums, versions (`publish`)
      plain.pt         whatever the caller keeps with it
      contents.pt      shapes, hyperparameters, numbers of optimizers (`contents`)
      .metadata        which elements lie where, by PyTorch Distributed Checkpoint (DCP)
      __<i>_0.distcp   the elements that writer i wrote

The tensors are ``model.<name>``, ``main.<name>`` (32-bit main parameters where parameters have 16 bits) and
``optimizer.<number>.<key>.<name>``. See [Note: flat tensors] in `chunks`.
"""

import io
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_replica.checkpoint import contents as stored
from lightning_replica.checkpoint import coverage, publish
from lightning_replica.checkpoint.chunks import Chunk, write_chunks, write_metadata
from lightning_replica.checkpoint.contents import CONTENTS, PLAIN, Contents, StateInfo, check_model, read_contents
from lightning_replica.checkpoint.coverage import METADATA
from lightning_replica.checkpoint.destination import destination
from lightning_replica.checkpoint.files import Files
from lightning_replica.checkpoint.location import Given, Location, locate
from lightning_replica.checkpoint.manifest import FileInfo, Manifest
from lightning_replica.checkpoint.reads import Reads
from lightning_replica.checkpoint.together import Together
from lightning_replica.checkpoint.writes import Writes, describe, group_names, weights_of
from lightning_replica.errors import CheckpointError
from lightning_replica.points import reach
from lightning_replica.sharding.state import ShardedState


@dataclass(frozen=True)
class Staged:
    """All that one rank writes of a checkpoint, as `stage` makes it and `write` takes it.

    Attributes:
        path: The directory to write, or its URL.
        chunks: The tensors.
        files: Content of other files, by name; rank 0's.
        contents: What the checkpoint shall hold; rank 0's.
        rank: This rank in the world.
        described: The checkpoint's manifest, but for what is only known once it is written.
    """

    path: Location
    chunks: tuple[Chunk, ...]
    files: Mapping[str, bytes]
    contents: Contents | None
    rank: int
    described: Manifest

    def copied(self) -> "Staged":
        """The same in memory of its own, which training does not change."""
        return replace(self, chunks=tuple(replace(each, data=each.data.cpu().clone()) for each in self.chunks))


def save_sharded(
    path: Given,
    state: ShardedState,
    names: Sequence[str],
    extra_tensors: Mapping[str, Tensor],
    plain: Mapping[str, Any],
    *,
    aliases: Mapping[str, str] | None = None,
    group: dist.ProcessGroup | None = None,
    ranks: Collection[int] | None = None,
    step: int | None = None,
    written_for: str = "periodic",
) -> None:
    """Writes a checkpoint, every element once, all ranks in parallel. Collective.

    At every instant ``path`` is what it was before or the whole new checkpoint; see `publish` and, for a URL,
    `attempts` for what a crash leaves.
    On return, on any rank, it is published. The arguments are those of `stage`.

    Raises:
        CheckpointError: On every rank of the group, if any could not do its part. What was published stays.
    """
    together = Together(group)
    staged = stage(
        path, state, names, extra_tensors, plain, together, aliases=aliases, ranks=ranks, step=step,
        written_for=written_for,
    )  # fmt: skip
    write(staged, together)


def stage(
    path: Given,
    state: ShardedState,
    names: Sequence[str],
    extra_tensors: Mapping[str, Tensor],
    plain: Mapping[str, Any],
    together: Together,
    *,
    aliases: Mapping[str, str] | None = None,
    ranks: Collection[int] | None = None,
    step: int | None = None,
    written_for: str = "periodic",
) -> Staged:
    """Finds out what this rank writes. Collective. Nothing is written yet, nor are tensors copied.

    Args:
        path: The directory to write, or its URL.
        state: The sharded state.
        names: Name of every parameter, in registration order.
        extra_tensors: What the module's state dict has beside the trained parameters, by name; the same on all ranks.
        plain: What else to keep: tensors and plain data. Rank 0 of the group writes it.
        together: Who saves.
        aliases: For every further name of a parameter or buffer (tied weights), its first.
        ranks: Whose pieces this rank writes; None is its own. Where only survivors save, one writes those of a peer
            that is gone. Over the group, the pieces of all ranks, each once.
        step: Optimizer steps in the state, by which a reader knows which of two checkpoints is the newer.
        written_for: Why it is written, for whoever looks at it later: "periodic", "gasp", "planned".

    Raises:
        CheckpointError: On every rank of the group, if what shall be saved cannot be.
    """
    writes = Writes()

    def prepare() -> list[dict[str, StateInfo]]:
        weights_of(state, names, extra_tensors)
        writes.add_pieces(state, names, {state.rank} if ranks is None else ranks)
        writes.add_extras(extra_tensors, together.rank, together.size)
        return writes.state

    prepared = together.all(prepare)

    def pack() -> tuple[dict[str, bytes], Contents | None]:
        if together.rank != 0:
            return {}, None
        contents = describe(state, weights_of(state, names, extra_tensors), aliases or {}, names, prepared)
        files = {
            PLAIN: _as_bytes(plain, "what is kept beside the weights"),
            CONTENTS: _as_bytes(contents.as_plain(), "the optimizers' state"),
        }
        return files, contents

    files, found = together.run(pack)
    grid, partition = state.grid, state.buffers[0].partition
    described = Manifest({}, grid.world_size, grid.replicas, partition, step, written_for, {})
    return Staged(locate(path), tuple(writes.chunks), files, found, state.rank, described)


def write(staged: Staged, together: Together) -> None:
    """Writes and publishes. Collective over those who have staged it.

    Raises:
        CheckpointError: On every rank, if any could not do its part. What was published stays.
    """
    to = destination(staged.path)

    def write_part() -> tuple[int, str, dict[str, FileInfo], bytes]:
        for name, content in staged.files.items():
            publish.write_file(to.directory / name, content)
        written = write_chunks(to.directory, staged.chunks, together.rank, to.durable)
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
            raise CheckpointError(f"{staged.path} is not written, as it would not be whole: {problem}.")
        to.deliver([to.directory / METADATA])
        to.publish(manifest)

    with to:
        to.join(together.all(lambda: to.begin(first=together.rank == 0))[0])
        everyone = together.all(write_part)
        together.run(publish_it)


def load_sharded(
    path: Given,
    state: ShardedState,
    names: Sequence[str],
    extra_tensors: Mapping[str, Tensor],
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Reads a checkpoint into parameters, main parameters, optimizers and ``extra_tensors``, in place. Collective.

    Each rank reads all weights, and of the rest only what its shard needs. Optimizers take their state through their
    own ``load_state_dict``. Checksums are taken once, each by one rank.

    Args:
        path: The directory, or its URL.
        state: The sharded state; of any number of ranks, replicas, and partition.
        names: Name of every parameter, in registration order.
        extra_tensors: What the module's state dict has beside the trained parameters, by name.
        group: Who loads; None is the default group.

    Raises:
        CheckpointError: On every rank of the group, if the checkpoint is damaged or of another model, before anything
            has changed; or if one could not read.
    """
    together = Together(group)

    def check() -> tuple[Files, Manifest, Contents]:
        directory = publish.published(locate(path))
        manifest = publish.verify(directory, share=(together.rank, together.size))
        contents = read_contents(directory)
        coverage.check(directory, manifest, contents)
        check_model(contents, weights_of(state, names, extra_tensors), group_names(state, names))
        return directory, manifest, contents

    directory, manifest, contents = together.run(check)

    @torch.no_grad()
    def read() -> None:
        reads = Reads(contents)
        reads.values(state, names)
        reads.extras(extra_tensors)
        states = [reads.state(number, sharded, names) for number, sharded in enumerate(state.optimizers)]
        reads.run(directory, manifest.files)
        for sharded, found, info in zip(state.optimizers, states, contents.optimizers, strict=True):
            sharded.load_state(found, info.groups)

    together.run(read)


def read_plain(path: Given | Files) -> dict[str, Any]:
    """What was given as ``plain``. Needs no other rank.

    Raises:
        CheckpointError: If the checkpoint is damaged. Checksums of tensors are left to `load_sharded`.
    """
    return stored.read_plain(publish.published(path if isinstance(path, Files) else locate(path)), PLAIN)


def beside_trained(module: nn.Module, state: ShardedState) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What a checkpoint of ``module`` holds beside the trained parameters.

    Returns:
        The tensors of its state dict that are frozen, in no optimizer, or buffers; and for every further name of a
        tensor its first, which for a parameter is the one in ``named_parameters``.
    """
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    trained = {id(parameter) for buffers in state.buffers for parameter in buffers.parameters}
    extra_tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            continue
        if first.setdefault(id(tensor), name) != name:
            aliases[name] = first[id(tensor)]
        elif id(tensor) not in trained:
            extra_tensors[name] = tensor
    return extra_tensors, aliases


def _as_bytes(content: Mapping[str, Any], what: str) -> bytes:
    """As ``torch.save`` writes it, once it is clear that it can be read again."""
    content = dict(content)
    if not _is_plain(content):
        raise CheckpointError(
            f"A checkpoint holds tensors and plain data only, but in {what} {_not_plain(content, 'checkpoint')}."
            " Save numbers, strings, lists, dicts and tensors in its place."
        )
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def _is_plain(content: Any) -> bool:
    """Whether ``torch.load`` would read it with ``weights_only=True``."""
    buffer = io.BytesIO()
    try:
        torch.save(content, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True, map_location="meta")
    except Exception:
        return False
    return True


def _not_plain(content: Any, where: str) -> str:
    """Names the innermost thing that is not plain."""
    inner = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in inner:
        if not _is_plain(value):
            return _not_plain(value, f"{where}[{key!r}]")
    return f"{where} is a {type(content).__module__}.{type(content).__qualname__}"
