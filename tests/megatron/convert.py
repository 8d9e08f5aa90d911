"""Ranks that write and load checkpoints under one division of the model after the other, without training.

Every element of the whole model has a value of its own. `fill` gives each rank what megatron-core says that it has.
"""

import sys
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_replica._compat import megatron
from lightning_replica.checkpoint.barrier import Barrier
from lightning_replica.checkpoint.location import locate
from lightning_replica.checkpoint.manifest import Provenance
from lightning_replica.checkpoint.named_model import NamedModel
from lightning_replica.checkpoint.sharded import load_sharded, stage, untrained_tensors_of, write
from lightning_replica.errors import CheckpointError
from lightning_replica.megatron.division import part_of
from lightning_replica.megatron.sizes import ParallelSizes
from lightning_replica.sharding.engine import EngineSettings, make_engine
from tests.megatron import job
from tests.megatron.job import Case
from tests.support.job import Faults
from tests.support.ranks import open_world, run_ranks

STATE = ("exp_avg", "exp_avg_sq")


def convert(ranks: int, jobs: Sequence[tuple[str, Case, Path]]) -> list[list[str]]:
    """Has ranks "save" or "load" checkpoints, or "save by megatron"; returns what each rank says of each."""
    found = run_ranks(ranks, _work, [(what, case, str(path)) for what, case, path in jobs], timeout_s=240)
    raised = [each for each in found if not isinstance(each, list)]
    assert not raised, raised[0]
    return found


def value(key: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor of the whole model, which has no other's values."""
    return torch.arange(prod(shape)).view(shape) + float(zlib.crc32(key.encode()) % 9973 * 1024)


def fill(module: job.GPT, salt: str) -> None:
    """Gives each parameter of ``module`` its part of the whole model."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    def walk(entry: Any) -> None:
        if isinstance(entry, ShardedTensor):
            entry.data.copy_(value(salt + entry.key, entry.global_shape)[entry.global_slice()])
        elif isinstance(entry, (dict, list)):
            for each in entry.values() if isinstance(entry, dict) else entry:
                walk(each)

    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    model: Any = module.model
    described = model.sharded_state_dict()
    if hasattr(module, "head"):
        described |= module.head.sharded_state_dict("head.", metadata={"dp_cp_group": group})
    apply_factories(described)
    with torch.no_grad():
        walk(described)


def _make_groups(case: Case) -> None:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        case.tensor,
        case.pipeline,
        expert_model_parallel_size=case.expert,
        expert_tensor_parallel_size=case.experts_tensor,
    )


class Rank:
    """One rank of a case."""

    def __init__(self, case: Case, rank: int) -> None:
        sizes = ParallelSizes(case.tensor, case.pipeline, 1, case.expert, case.experts_tensor)
        _make_groups(case)
        megatron.seed(7)
        self.module = job.GPT(case, Faults(case, Path()))
        self.module.configure_model()
        grids = sizes.grids(case.devices, case.replicas, 1)
        self.part = part_of(self.module, sizes, rank, case.devices, bool(grids.experts))
        assert self.part.boxes.keys() == dict(self.module.named_parameters()).keys()
        self.expected = {}
        for salt in (*STATE, ""):
            fill(self.module, salt)
            self.expected[salt] = [parameter.detach().clone() for parameter in self.module.parameters()]
        settings = EngineSettings(bucket_bytes=1024, uncounted=self.part.uncounted, experts=self.part.experts)
        parameters, optimizers = list(self.module.parameters()), [self.module.configure_optimizers()]
        self.engine = make_engine(grids.grids_of(rank), rank, parameters, optimizers, settings)
        extras, _ = untrained_tensors_of(self.module, self.engine)
        self.extras = self.part.all_named(extras)
        self.names = [self.part.named(name) for name, _ in self.module.named_parameters()]

    def pieces(self) -> Iterator[tuple[Any, dict[str, Any], dict[str, Any]]]:
        """Each piece of the shard: its state, and the state that it should have."""
        (sharded,) = self.engine.optimizers
        for piece in sharded.pieces:
            begin, end = piece.start, piece.start + piece.parameter.numel()
            state = {key: self.expected[key][piece.order].view(-1)[begin:end] for key in STATE}
            expected = {key: each.view(piece.parameter.shape) for key, each in state.items()}
            yield piece, sharded.optimizer.state[piece.parameter], {"step": torch.tensor(3.0), **expected}

    def named(self) -> NamedModel:
        return NamedModel(self.names, self.extras, parts=self.part.names, whole=self.part.whole())

    def save(self, path: str) -> str:
        for _, state, expected in self.pieces():
            state |= {key: each.clone() for key, each in expected.items()}
        barrier = Barrier(None)
        write(stage(locate(path), self.engine, self.named(), {}, barrier, provenance=Provenance(3)), barrier)
        return ""

    def load(self, path: str) -> str:
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.fill_(-1)
        try:
            load_sharded(path, self.engine, self.named())
        except CheckpointError as error:
            return str(error)
        return ", ".join(self.wrong())

    def wrong(self) -> Iterator[str]:
        for name, parameter, expected in zip(self.names, self.module.parameters(), self.expected[""], strict=True):
            if not torch.equal(parameter, expected):
                yield name
        for piece, state, wanted in self.pieces():
            if state.keys() != wanted.keys() or not all(torch.equal(state[key], wanted[key]) for key in wanted):
                yield f"state of {self.names[piece.order]}"


class ByMegatron:
    """One rank of a case that has megatron-core alone: its own data parallelism, optimizer and checkpoints."""

    def __init__(self, case: Case, rank: int) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        _make_groups(case)
        megatron.seed(7)
        self.module = job.GPT(case, Faults(case, Path()))
        self.module.configure_model()
        self.chunk = DistributedDataParallel(
            self.module.model.config, DistributedDataParallelConfig(use_distributed_optimizer=True), self.module.model
        )
        config = OptimizerConfig(optimizer="adam", lr=1e-2, adam_eps=job.EPSILON, use_distributed_optimizer=True)
        self.optimizer = get_megatron_optimizer(config, [self.chunk])
        for each in self.optimizer.chained_optimizers:  # makes the state
            each.load_state_dict({"optimizer": {"param_groups": self._groups(each)}})
        self.metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
        }

    @staticmethod
    def _groups(optimizer: Any) -> list[dict[str, Any]]:
        groups = optimizer.optimizer.state_dict()["param_groups"]
        return [{**{key: each for key, each in group.items() if key != "params"}, "step": 3} for group in groups]

    def states(self) -> Iterator[tuple[str, str, Tensor, Tensor]]:
        """Each part of a parameter's state that this rank has, and what it should be."""
        for salt in ("exp_avg", "exp_avg_sq", "param"):
            fill(self.module, "" if salt == "param" else salt)
            wanted = {name: each.detach().clone() for name, each in self.module.named_parameters()}
            for name, parameter in self.module.named_parameters():
                for each in self.optimizer.chained_optimizers:
                    if parameter in each.model_param_gbuf_map:
                        place = each._get_model_param_range_map(parameter)["param"]
                        state = each._get_main_param_and_optimizer_states(parameter)
                        yield name, salt, state[salt], wanted[name].view(-1)[place.start : place.end]

    def described(self, is_loading: bool) -> dict[str, Any]:
        model: Any = self.module.model
        described = model.sharded_state_dict(metadata=self.metadata)
        optimizer = self.optimizer.sharded_state_dict(described, is_loading=is_loading, metadata=self.metadata)
        return {"model": described, "optimizer": optimizer}

    def load(self, path: str) -> str:
        from megatron.core import dist_checkpointing

        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.fill_(-1)
        loaded = dist_checkpointing.load(self.described(is_loading=True), path)
        self.module.model.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])
        assert (loaded["iteration"], loaded["checkpoint_version"]) == (3, 3.0)
        values = [parameter.detach().clone() for parameter in self.module.parameters()]
        wrong = [f"{name} {salt}" for name, salt, state, wanted in self.states() if not torch.equal(state, wanted)]
        named = zip(self.module.named_parameters(), values, strict=True)  # by now `states` has filled them
        wrong += [name for (name, parameter), read in named if not torch.equal(read, parameter)]
        steps = {
            float(each["step"]) for one in self.optimizer.chained_optimizers for each in one.optimizer.state.values()
        }
        return ", ".join([*wrong, *(["steps"] if steps != {3.0} else [])])

    def save(self, path: str) -> str:
        from megatron.core import dist_checkpointing

        for _, _, state, wanted in self.states():
            with torch.no_grad():
                state.copy_(wanted)
        Path(path).mkdir(parents=True, exist_ok=True)
        common = {"iteration": 3, "checkpoint_version": 3.0}
        dist_checkpointing.save({**self.described(is_loading=False), **common}, path, content_metadata=self.metadata)
        return ""


@contextmanager
def on_cpu() -> Iterator[None]:
    """Lets megatron-core run on a CPU."""
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    import megatron_cpu

    megatron_cpu.install()
    megatron_cpu.pass_for_cuda()
    _let_torch_adam_load()
    yield


def _let_torch_adam_load() -> None:
    """With torch's Adam, megatron-core 0.16 loads no state that is fully reshardable, its own neither: it lacks steps.

    It gets them with the param groups.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    real = DistributedOptimizer._set_main_param_and_optimizer_states

    def put(self: Any, parameter: nn.Parameter, tensors: dict[str, Tensor]) -> None:
        step = self._get_main_param_and_optimizer_states(parameter)["step"]
        real(self, parameter, {**tensors, "step": step})

    DistributedOptimizer._set_main_param_and_optimizer_states = put


def _work(rank: int, store: Any, jobs: Sequence[tuple[str, Case, str]]) -> list[str]:
    said = []
    with on_cpu():
        open_world(rank, store, jobs[0][1].devices)
        from megatron.core import parallel_state

        for what, case, path in jobs:
            made = ByMegatron if what.endswith("by megatron") else Rank
            said.append(getattr(made(case, rank), what.split()[0])(path))
            parallel_state.destroy_model_parallel()
    return said
