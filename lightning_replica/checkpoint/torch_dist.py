"""Export to megatron-core's checkpoints (its format "torch_dist"), which needs no megatron-core.

    <directory>/
      latest_checkpointed_iteration.txt   the number of the newest
      iter_0000123/
        metadata.json                     which format it is
        common.pt                         what is no tensor: the iteration, the optimizer's hyperparameters
        .metadata, __0_0.distcp           tensors of the whole model, by DCP

Tensors have the names of the whole model: ``<key>``, and ``optimizer.state.<entry>.<key>`` for the optimizer's state
where it is "fully reshardable". There, "param" is the main parameter.
"""

import io
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from lightning_replica.checkpoint import coverage, publish, verification
from lightning_replica.checkpoint.chunks import ChunkReader
from lightning_replica.checkpoint.contents import Contents, named_dtype, read_contents
from lightning_replica.checkpoint.location import Given, locate
from lightning_replica.checkpoint.whole_model import WholeModel, WholeTensor
from lightning_replica.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
COMMON = "common.pt"
KIND = "metadata.json"
_KIND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_SHARDING = "fully_reshardable"
# What megatron-core asks for its sharded_state_dict when it loads.
_CONTENT = {
    "distrib_optim_sharding_type": _SHARDING,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


def name_of(iteration: int) -> str:
    """Return the name of the directory of an iteration."""
    return f"iter_{iteration:07d}"


def export_megatron(path: Given, directory: Path) -> tuple[Path, list[str]]:
    """Write a sharded checkpoint of a model of megatron-core for `megatron.core.dist_checkpointing.load`.

    This process works alone. One tensor of the whole model at a time must fit into memory.

    Args:
        path: The checkpoint, or its URL.
        directory: The directory in which that of the iteration is made.

    Returns:
        The directory of the iteration; and the weights that are not in it, because nothing says where they lie in the
        whole model.

    Raises:
        CheckpointError: If the checkpoint is damaged, does not say where its tensors lie, or was written already.
    """
    found = verification.published(locate(path))
    manifest = verification.verify(found)
    contents = read_contents(found)
    coverage.check(found, manifest, contents)
    model, iteration = WholeModel(contents), manifest.step or 0
    target = directory / name_of(iteration)
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists. Move it away, or export to another directory.")
    unfinished = target.with_name(f"{target.name}.tmp-{secrets.token_hex(4)}")
    publish.make_directory(directory)
    try:
        unfinished.mkdir()
        _write(unfinished, _tensors(model), contents, ChunkReader(found, manifest.files))
        publish.write_file(unfinished / COMMON, _common(model, contents, iteration))
        publish.write_file(unfinished / KIND, json.dumps(_KIND).encode())
        publish.sync(unfinished)
        unfinished.rename(target)
    except BaseException:
        publish.discard(unfinished)
        raise
    publish.replace_file(directory / TRACKER, str(iteration).encode())
    return target, model.left_out


def _tensors(model: WholeModel) -> dict[str, WholeTensor]:
    tensors = model.weights()
    for entry, state in model.state().items():
        tensors |= {f"optimizer.state.{entry}.{key}": tensor for key, tensor in state.items()}
    if model.state():
        tensors |= {f"optimizer.state.param.{key}": tensor for key, tensor in model.main().items()}
    return tensors


def _common(model: WholeModel, contents: Contents, iteration: int) -> bytes:
    """Return what is no tensor, as ``torch.save`` writes it."""
    common: dict[str, Any] = {"iteration": iteration, "checkpoint_version": 3.0, "content_metadata": _CONTENT}
    if model.state():
        steps = model.steps() or iteration
        apart = any("experts" in part for part in contents.parts)  # then megatron-core has a second optimizer for them
        # Each is an object of its own: megatron-core puts the tensors that it reads into them.
        first, second = (
            {"optimizer": {"param_groups": _groups(contents, steps)}, "param_state_sharding_type": _SHARDING}
            for _ in range(2)
        )
        common["optimizer"] = {0: first, 1: second} if apart else first
    buffer = io.BytesIO()
    torch.save(common, buffer)
    return buffer.getvalue()


def _groups(contents: Contents, steps: int) -> list[dict[str, Any]]:
    """Return param groups for each kind of parameter that megatron-core tells apart, from those of the checkpoint.

    It finds its own groups among them by these marks. Before each step, its scheduler sets what it schedules.
    """
    own = [{**group} for each in contents.optimizers for group in each.groups]
    groups = []
    for decays in (1.0, 0.0):
        alike = [group for group in own if bool(group.get("weight_decay")) == bool(decays)]
        group = {key: value for key, value in (alike or own or [{}])[0].items() if key != "params"}
        for experts in (False, True):
            marks = {"wd_mult": decays, "lr_mult": 1.0, "is_expert_parallel": experts, "is_decoupled_lr": False}
            groups.append({**group, **marks, "step": steps})
    return groups


def _write(directory: Path, tensors: Mapping[str, WholeTensor], contents: Contents, reader: ChunkReader) -> None:
    writer, planner = dcp.FileSystemWriter(directory), _Planner(tensors, contents, reader)
    planner.set_up_planner({}, None, is_coordinator=True)
    writer.reset()
    writer.set_up_storage_writer(is_coordinator=True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    writer.finish(metadata, [writer.write_data(plan, planner).wait()])
    publish.sync(directory / coverage.METADATA)


class _Planner(dcp.DefaultSavePlanner):
    """Has whole tensors written. Each is put together when it is its turn."""

    def __init__(self, tensors: Mapping[str, WholeTensor], contents: Contents, reader: ChunkReader) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._tensors, self._contents, self._reader = tensors, contents, reader

    def create_local_plan(self) -> SavePlan:
        items = [_item(name, torch.Size(each.shape), each.dtype) for name, each in self._tensors.items()]
        objects: Sequence[str] = self._contents.objects
        self.plan = SavePlan(
            [*items, *(WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO) for name in objects)]
        )
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        if index.fqn in self._tensors:
            return self._tensors[index.fqn].read(self._contents, self._reader)
        return [None]  # as megatron-core writes an object that holds nothing


def _item(name: str, size: torch.Size, dtype: str) -> WriteItem:
    offsets = torch.Size([0] * len(size))
    place = ChunkStorageMetadata(offsets, size)
    data = TensorWriteData(place, TensorProperties(dtype=named_dtype(dtype)), size)
    return WriteItem(index=MetadataIndex(name, offsets), type=WriteItemType.SHARD, tensor_data=data)
