"""Handles serve whoever calls torch.distributed: before and after a regroup, and in a replacement."""

import re
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import CatMetric

from lightning_replica.control.blobs import Blobs
from lightning_replica.control.journal import Journal
from lightning_replica.devices.cpu import Cpu
from lightning_replica.errors import ClosedGroupError, CollectiveError, ConfigurationError, RecoveryError
from lightning_replica.groups import handles
from lightning_replica.groups.handles import Answered, Handle, Noted
from lightning_replica.groups.names import Held
from lightning_replica.groups.world import ProcessGroups
from tests.support.ranks import meet, run_ranks
from tests.support.typed import grad_of, world_group

RANKS = 4


def none(_: timedelta) -> Iterable[dist.ProcessGroup]:
    return ()


class Code:
    """Code of other people's, which has made groups and keeps them."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.pair = dist.new_group([0, 1] if rank < 2 else [2, 3], use_local_synchronization=True)
        self.gloo = dist.new_group(backend="gloo", timeout=timedelta(days=10000))
        self.mesh = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("a", "b"))
        closed = dist.new_group()
        dist.barrier(closed)  # to destroy it while a peer is still connecting would fail there, with plain torch too
        dist.destroy_process_group(closed)

    def run(self, out: str) -> list[Any]:
        """Calls everything there is; what each call gives differs from rank to rank where it can."""
        found = [getattr(self, name)() for name in sorted(vars(Code)) if name.startswith("call_")]
        return [*found, self.checkpoint(out)]

    def mine(self) -> torch.Tensor:
        return torch.arange(4.0) * (1 + self.rank)

    def call_all_reduce(self) -> Any:
        works, tensors = [], [self.mine() for _ in range(3)]
        for tensor, group in zip(tensors, (None, self.pair, self.mesh.get_group("b")), strict=True):
            works.append(dist.all_reduce(tensor, group=group, async_op=True))
        for work in works[::-1]:  # they end in another order than they begin
            work.wait()
        return [tensor.tolist() for tensor in tensors]

    def call_all_gather(self) -> Any:
        rows = [torch.empty(4) for _ in range(RANKS)]
        dist.all_gather(rows, self.mine())
        flat = torch.empty(4 * RANKS)
        dist.all_gather_into_tensor(flat, self.mine(), group=self.gloo)
        return [torch.stack(rows).tolist(), flat.tolist()]

    def call_scatter_and_gather(self) -> Any:
        part, rows = torch.empty(1), [torch.empty(4) for _ in range(RANKS)]
        dist.scatter(part, list(torch.arange(float(RANKS)).split(1)) if self.rank == 1 else None, src=1)
        dist.gather(self.mine(), rows if self.rank == 2 else None, dst=2)
        return [part.tolist(), torch.stack(rows).tolist() if self.rank == 2 else None]

    def call_reduce_scatter_and_all_to_all(self) -> Any:
        part = torch.empty(2)
        dist.reduce_scatter_tensor(part, torch.ones(2 * RANKS) * self.rank)
        uneven = torch.empty(3 * RANKS)
        dist.all_to_all_single(uneven, torch.ones(3 * RANKS) * self.rank, [3] * RANKS, [3] * RANKS)
        reduced = self.mine()
        dist.reduce(reduced, 0)
        return [part.tolist(), uneven.tolist(), reduced.tolist() if self.rank == 0 else None]

    def call_objects(self) -> Any:
        objects: list[Any] = [{"sent": 5}]
        dist.broadcast_object_list(objects, 0)
        gathered: list[Any] = [None] * RANKS
        dist.all_gather_object(gathered, "x" * (1 + self.rank))
        return [objects, gathered]

    def call_point_to_point(self) -> Any:
        here = torch.full((2,), float(self.rank))
        if self.rank % 2 == 0:
            dist.send(here, self.rank + 1)
        else:
            dist.recv(here, self.rank - 1)
        return here.tolist()

    def call_barriers(self) -> Any:
        dist.barrier()
        dist.barrier(self.pair)
        dist.monitored_barrier(self.gloo)
        assert isinstance(self.gloo, Handle)
        self.gloo.barrier()  # as Lightning's `_InfiniteBarrier` calls it
        return dist.get_backend(self.pair)

    def call_ddp(self) -> Any:
        torch.manual_seed(self.rank)
        net = DistributedDataParallel(nn.Linear(4, 4))
        net(self.mine()).sum().backward()
        return [grad_of(parameter).tolist() for parameter in net.parameters()]

    def call_torchmetrics(self) -> Any:
        metric = CatMetric()
        metric.update(torch.ones(self.rank + 1))
        return metric.compute().tolist()

    def call_functional(self) -> Any:
        return torch.distributed._functional_collectives.all_reduce(self.mine(), "sum", world_group()).tolist()

    def checkpoint(self, out: str) -> Any:
        state = {"x": torch.arange(4.0) + 1}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.distributed.checkpoint.save(state, checkpoint_id=out)
            state["x"].zero_()
            torch.distributed.checkpoint.load(state, checkpoint_id=out)
        return state["x"].tolist()


def lasts(rank: int, store: Any, out: str) -> dict[str, bool]:
    import torch.distributed.checkpoint  # noqa: F401

    journal = Journal(store, rank, blobs=Blobs(Path(out)))
    own = ProcessGroups(store, rank, RANKS, Cpu(), 60, journal=journal)
    own.open(0, none)
    code = Code(rank)
    first = code.run(f"{out}/first")
    journal.close()
    later = code.run(f"{out}/first")
    held = own.held()
    told: list[Any] = [None] * RANKS
    dist.all_gather_object(told, held)
    own.leave()
    with pytest.raises(CollectiveError, match="A recovery is under way"):
        dist.barrier()
    own.open(1, none, held=dict(enumerate(told)))
    again = code.run(f"{out}/first")
    dist.barrier()
    own.close()
    store.add("closed", 1)
    while store.add("closed", 0) < RANKS:
        pass

    if rank:  # one after the other: each writes its part of the checkpoint again, and reads that of the others
        store.wait([f"alone/{rank - 1}"])
    journal = Journal(store, rank, reading=1, blobs=Blobs(Path(out)))
    alone = ProcessGroups(store, rank, RANKS, Cpu(), 60, journal=journal)
    alone.hold()
    answered = Code(rank).run(f"{out}/first")
    result = {"later": later == first, "after a regroup": again == first, "in a replacement": answered == first}
    alone.close()
    store.set(f"alone/{rank}", "")
    return result


def test_all_that_torch_offers(tmp_path: Path) -> None:
    expected = {"later": True, "after a regroup": True, "in a replacement": True}
    assert run_ranks(RANKS, lasts, str(tmp_path), timeout_s=120) == [expected] * RANKS


def replaced(rank: int, store: Any) -> dict[str, Any]:
    """Rank 1 loses all it has, as if it were a new process; the others keep their handles."""

    def regroup(own: ProcessGroups, generation: int) -> None:
        store.set(f"held/{generation}/{rank}", repr([list(own.held().alive), list(own.held().gone)]))
        held = {}
        for each in range(2):
            alive, gone = eval(store.get(f"held/{generation}/{each}"))
            held[each] = Held(tuple(alive), tuple(gone))
        own.open(generation, none, held=held)

    def total(group: Any) -> float:
        dist.all_reduce(one := torch.ones(1), group=group)
        return one.item()

    journal = Journal(store, rank)
    own = ProcessGroups(store, rank, 2, Cpu(), 60, journal=journal)
    own.open(0, none)
    in_set_up = dist.new_group()
    total(in_set_up)
    journal.close()
    late, gone = dist.new_group(), dist.new_group()
    total(late)
    dist.destroy_process_group(gone)
    if rank == 1:
        own.close()
        journal = Journal(store, rank, reading=1)
        own = ProcessGroups(store, rank, 2, Cpu(), 60, journal=journal)
        own.hold()
        in_set_up = dist.new_group()
        answered = total(in_set_up)
        journal.close()
        regroup(own, 1)
    else:
        answered = 2.0
        own.leave()
        regroup(own, 1)
    hooks = dist.new_group()  # in a hook of the recovery
    own.hooks_are_through()
    if rank == 1:
        late = dist.new_group()  # as its script does at its first batch; the other has it
    sums = [answered, total(in_set_up), total(hooks), total(late), total(dist.new_group())]
    own.close()
    return {"sums": sums}


def test_a_replacement_gets_the_groups_that_the_others_have() -> None:
    assert run_ranks(2, replaced) == [{"sums": [2.0] * 5}] * 2


def closed(rank: int, store: Any) -> str:
    own = ProcessGroups(store, rank, 2, Cpu(), 60)
    own.open(0, none)
    group = dist.new_group()
    dist.barrier(group)
    held = {0: own.held(), 1: Held(gone=own.held().alive)}
    own.leave()
    own.open(1, none, held=held)
    meet(rank, store, 2, "open")
    try:
        dist.barrier(group)
    except ClosedGroupError as error:
        own.close()
        return str(error)
    return "no error"


def test_a_group_that_others_have_destroyed() -> None:
    said = "Process group of ranks [0, 1]: another member no longer has it"
    assert all(found.startswith(said) for found in run_ranks(2, closed))


# What a handle only passes on: all of it is asked of a group, or made of one, and moves no tensor of the caller's.
PASSED_ON = {
    *("_start_coalescing", "_end_coalescing", "_get_backend", "_get_backend_name", "get_backend", "get_group_store"),
    *("_set_sequence_number_for_group", "_get_sequence_number_for_group", "_has_hooks", "_wait_for_pending_works"),
    *("_add_ephemeral_timeout", "new_window", "supports_window"),
    *("reconfigure", "get_reconfigure_handle", "supports_reconfigure"),
    *("supports_abort_hooks", "supports_completion_hooks"),
}
MADE_BY_PYBIND = re.compile("__.*__|_pybind11_.*|[A-Z]+")  # the last: members of `BackendType`


def test_every_method_of_torchs_groups_is_known() -> None:
    hooks = {f"{verb}_{hook}" for verb in ("register", "unregister") for hook in handles._HOOKS}
    data = {*handles._OPERATIONS, *handles._FILL_NOTHING, *handles._MAKE_GROUPS}
    known = data | hooks | {*handles._SETTINGS, *handles._OWN} | PASSED_ON
    names = {name for name in vars(dist.ProcessGroup) if not MADE_BY_PYBIND.fullmatch(name)}
    assert names <= known, f"torch {torch.__version__} has methods of groups that nobody has looked at"
    assert names - set(vars(Handle)) <= set(handles._OWN), "a handle answers for a group without asking it"


OF_WORK = {
    *("is_completed", "is_success", "exception", "source_rank", "_source_rank", "result", "synchronize", "wait"),
    *("block_current_stream", "get_future", "get_future_result", "_get_op_type", "_get_duration", "boxed", "unbox"),
    *("_get_sequence_number", "timeout"),
}


def test_every_method_of_torchs_works_is_known() -> None:
    names = {name for name in vars(dist.Work) if not MADE_BY_PYBIND.fullmatch(name)}
    assert names <= OF_WORK, f"torch {torch.__version__} has methods of works that nobody has looked at"
    assert names - set(vars(Noted)) <= set(handles._OWN_OF_WORK), "a noted work answers without asking the real one"


REFUSED: dict[str, Any] = {
    name: arguments
    for name, arguments in {"split_group": lambda _: ([0],), "merge_remote_group": lambda store: (store, 2)}.items()
    if hasattr(dist.ProcessGroup, name)
}


def refusals(rank: int, store: Any) -> list[str]:
    own = ProcessGroups(store, rank, 1, Cpu(), 60)
    own.open(0, none)
    said = []
    group: Any = dist.new_group()
    for name, arguments in REFUSED.items():
        call = partial(getattr(group, name), *arguments(store))
        with pytest.raises(ConfigurationError, match=r"Make it with `torch.distributed.new_group\(ranks\)`") as refused:
            call()
        said.append(str(refused.value).split()[0])
    own.leave()
    dist.destroy_process_group(group)
    with pytest.raises(ClosedGroupError):
        group.set("timeout", "set_timeout", timedelta(seconds=1))
    own.close()
    return said


def test_what_a_handle_refuses() -> None:
    assert run_ranks(1, refusals) == [[f"`{name}`" for name in REFUSED]]


def failing_setting(rank: int, store: Any) -> float:
    own = ProcessGroups(store, rank, 1, Cpu(), 60)
    own.open(0, none)
    group: Any = dist.new_group()
    held = {0: own.held()}
    own.leave()
    group.set("something", "a_method_that_no_group_has")
    own.open(1, none, held=held)
    dist.all_reduce(one := torch.ones(1), group=group)
    own.close()
    return one.item()


def test_a_setting_that_fails_after_a_recovery_is_no_failure_of_the_recovery() -> None:
    assert run_ranks(1, failing_setting) == [1.0]


def caught(rank: int, store: Any) -> list[str]:
    """A script that tries something that fails, and goes on."""

    def script() -> str:
        group: Any = dist.new_group()
        said = ""
        try:
            dist.all_gather_into_tensor(torch.empty(3), torch.ones(1), group=group)
        except RuntimeError as error:
            said = str(error)
        dist.all_reduce(one := torch.ones(1), group=group)
        return f"{said} {one.item()}"

    journal = Journal(store, rank)
    own = ProcessGroups(store, rank, 2, Cpu(), 60, journal=journal)
    own.open(0, none)
    first = script()
    own.close()
    alone = ProcessGroups(store, rank, 2, Cpu(), 60, journal=Journal(store, rank, reading=1))
    alone.hold()
    again = script()
    alone.close()
    return [first, again]


def test_a_collective_that_the_script_has_seen_fail() -> None:
    for first, again in run_ranks(2, caught):
        assert first == again
        assert first.endswith(" 2.0")
        assert len(first) > 10


def keeps_settings(rank: int, store: Any) -> dict[str, Any]:
    """What a caller sets in a group holds after a recovery too; what it takes back does not."""
    own = ProcessGroups(store, rank, 2, Cpu(), 60)
    own.open(0, none)
    group: Any = dist.new_group()
    group.set_timeout(timedelta(seconds=41))
    calls: list[str] = []
    hooks = hasattr(group.behind, "register_pre_hook")  # from torch 2.14
    if hooks:
        group.register_pre_hook(1, lambda _: calls.append("kept"))
        group.register_pre_hook(2, lambda _: calls.append("taken back"))
        group.unregister_pre_hook(2)
    held = {each: own.held() for each in range(2)}
    own.leave()
    group.set_timeout(timedelta(seconds=42))
    own.open(1, none, held=held)
    calls.clear()
    dist.all_reduce(torch.ones(1), group=group)
    called = set(calls) == ({"kept"} if hooks else set())
    if hasattr(dist, "gather_single"):  # from torch 2.14; that gloo cannot do it is said by the group behind
        with pytest.raises(RuntimeError, match="gloo does not support gather_single"):
            dist.gather_single(torch.ones(1), torch.empty(2), dst=rank, group=group)
    timeout = group._get_backend(torch.device("cpu")).options._timeout
    own.close()
    return {"timeout": timeout.total_seconds(), "calls": called}


def test_settings_of_a_group_outlive_a_recovery() -> None:
    assert run_ranks(2, keeps_settings) == [{"timeout": 42.0, "calls": True}] * 2


def asked(rank: int, store: Any) -> str:
    own = ProcessGroups(store, rank, 2, Cpu(), 60)
    own.open(0, none)
    make: Any = dist.distributed_c10d._new_process_group_helper
    common = (2, rank, [0, 1], "gloo", store)
    made, _ = make(*common, "one", timeout=timedelta(seconds=9), of_a_later_torch=None)
    assert isinstance(made, Handle)
    with pytest.raises(ConfigurationError, match="of_a_later_torch=True, which `replica_zero` cannot pass on"):
        make(*common, "other", timeout=timedelta(seconds=9), of_a_later_torch=True)
    own.close()
    return "refused"


def test_what_a_later_torch_asks_of_a_new_group() -> None:
    assert run_ranks(2, asked) == ["refused"] * 2


def test_a_work_that_is_answered_has_ended() -> None:
    work = Answered()
    assert work.wait(timedelta(seconds=1))
    assert work.is_completed()
    assert work.is_success()
    failed: Any = work.exception  # whose annotation says that it always returns None
    assert failed() is None
    assert work.get_future().wait() == []


def test_torch_makes_groups_in_its_own_way_again() -> None:
    before: Callable[..., Any] = dist.distributed_c10d._new_process_group_helper
    own = ProcessGroups(dist.HashStore(), 0, 1, Cpu(), 60)
    own.open(0, none)
    assert dist.distributed_c10d._new_process_group_helper is not before
    assert isinstance(dist.group.WORLD, Handle)
    own.close()
    assert dist.distributed_c10d._new_process_group_helper is before
    assert not dist.is_initialized()


def mismatch(rank: int, store: Any) -> str:
    journal = Journal(store, rank)
    own = ProcessGroups(store, rank, 2, Cpu(), 60, journal=journal)
    own.open(0, none)
    dist.all_reduce(torch.ones(1))
    own.close()
    alone = ProcessGroups(store, rank, 2, Cpu(), 60, journal=Journal(store, rank, reading=1))
    alone.hold()
    try:
        dist.broadcast(torch.ones(1), 0)
    except RecoveryError as error:
        return str(error)
    finally:
        alone.close()
    return "no error"


def test_another_call_is_an_error() -> None:
    for rank, said in enumerate(run_ranks(2, mismatch)):
        assert said.startswith(f"This replacement of rank {rank} called `broadcast` on float32[1] in "), said
        assert "its predecessor called `all_reduce` on float32[1] in " in said
        assert "test_handles.py:" in said
        assert "mismatch" in said
