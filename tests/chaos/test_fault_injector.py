"""FaultInjector and Fingerprint: bad input in this process, faults in forked ranks under a real supervisor."""

import copy
import functools
import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.nn.modules.module import _global_forward_hooks

from lightning_replica import ConfigurationError
from lightning_replica.callbacks import FaultInjector, Fingerprint, Injected, InjectedFault
from lightning_replica.chaos import compare
from lightning_replica.chaos.fault_injector import EXIT_CODE, _Ledger
from lightning_replica.chaos.fault_points import FAULT_POINTS, FaultPointCallback
from lightning_replica.chaos.faults import Dice, parse_all
from lightning_replica.chaos.fingerprint import digest
from lightning_replica.control.generation import Generations
from lightning_replica.control.keys import PHASE
from lightning_replica.core import points
from lightning_replica.core.grid import Grid
from lightning_replica.core.grids import Grids
from lightning_replica.core.points import PHASES
from lightning_replica.trainer.overrides import may_change_weights, who_sees_gradients
from tests.support import job, world
from tests.support.job import Case


@dataclass
class Injections(Case):
    """A training with a FaultInjector and a Fingerprint."""

    listed: str = ""
    options: dict[str, Any] | None = None


def train(case: Injections, out: Path) -> None:
    """`job.run`, with callbacks and places that it does not have itself."""
    original = L.Trainer.__init__

    def init(self: L.Trainer, **arguments: Any) -> None:
        injector = FaultInjector(case.listed, record=out / "struck", **(case.options or {}))
        arguments["callbacks"] += [injector, Fingerprint(out / "prints"), ModelCheckpoint(out / "checkpoints")]
        arguments.update(logger=CSVLogger(out), enable_checkpointing=True)
        original(self, **arguments)

    L.Trainer.__init__ = init  # type: ignore[method-assign]
    job.run(case, out)


def struck(out: Path) -> list[dict[str, Any]]:
    path = out / "struck"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def prints(out: Path) -> list[set[str]]:
    """What each rank has written, but for the lines that name its processes."""
    files = [(out / "prints" / f"rank{rank}.jsonl").read_text().splitlines() for rank in range(2)]
    return [{line for line in lines if '"world"' not in line} for lines in files]


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> tuple[world.Outcome, list[set[str]], Path]:
    out = tmp_path_factory.mktemp("untouched")
    outcome = world.run(Injections(devices=2), out, target=train)
    assert outcome.code == 0, outcome.logs
    assert struck(out) == []
    return outcome, prints(out), out


def run(listed: str, untouched: Any, out: Path, **options: Any) -> list[str]:
    """Runs with faults, asserts that they left no trace; returns those that struck."""
    outcome = world.run(Injections(devices=2, listed=listed, options=options), out, max_restarts=9, target=train)
    outcome.assert_same(untouched[0])
    assert prints(out) == untouched[1]
    return [line["fault"] for line in struck(out)]


def test_every_kind_once_though_ranks_are_replaced(untouched: Any, tmp_path: Path) -> None:
    listed = "kill:1:forward:1,exception:0:backward:2,exit:0:train_batch_end:3,memory:1:forward:4,kill:0:stop:4"
    assert set(run(listed, untouched, tmp_path)) == set(listed.split(","))


def test_places_in_the_user_s_code(untouched: Any, tmp_path: Path) -> None:
    listed = "kill:0:validation:1,kill:0:checkpoint:2,exception:1:epoch_end:2,kill:1:scheduler:4,kill:0:logger:6"
    assert set(run(listed, untouched, tmp_path)) == set(listed.split(","))


def test_random_faults_leave_each_other_time(untouched: Any, tmp_path: Path) -> None:
    found = run("", untouched, tmp_path, mtbf_steps=0.5, count=6, seed=3, kinds=["kill", "exception"])
    steps = [line["step"] for line in struck(tmp_path) if parse_all(line["fault"])[0].point not in PHASES]
    assert len(found) == len(set(found)) >= 2
    assert all(later - earlier >= 2 for earlier, later in zip(steps, steps[1:], strict=False))


def test_by_the_clock(untouched: Any, tmp_path: Path) -> None:
    assert run("exception:1:forward:0:0.001,exception:0:forward:0:1e9", untouched, tmp_path) == [
        "exception:1:forward:0:0.001"
    ]


def test_a_bit_that_flips_after_the_update(untouched: Any, tmp_path: Path) -> None:
    """The state is hashed while it is wrong, and again when the tail is done again, at the end of a later batch."""
    outcome = world.run(Injections(devices=2, listed="corrupt:1:scheduler:2"), tmp_path, target=train)
    outcome.assert_same(untouched[0])
    whole, hurt = compare.read(untouched[2] / "prints"), compare.read(tmp_path / "prints")
    assert compare.differences(whole, hurt) == [
        "rank 1: different optimizer state of the shard after step 2 (1 of 12 states differ)"
    ]
    assert compare.differences(whole, hurt, flipped=True) == []


def test_a_rank_that_is_not_there(tmp_path: Path) -> None:
    outcome = world.run(Injections(devices=2, listed="kill:2:forward:0"), tmp_path, target=train)
    assert outcome.code == 1
    assert "kill:2:forward:0 strikes rank 2, but the ranks are 0 to 1." in outcome.logs


def test_sigterm_ends_the_run_as_far_as_it_came(untouched: Any, tmp_path: Path) -> None:
    outcome = world.run(Injections(devices=2, listed="sigterm:1:backward:2"), tmp_path, target=train)
    assert (outcome.code, outcome.said) == (0, []), outcome.logs
    assert [line["fault"] for line in struck(tmp_path)] == ["sigterm:1:backward:2"]
    whole, part = compare.read(untouched[2] / "prints"), compare.read(tmp_path / "prints")
    assert [rank.last_step for rank in part] == [3, 3]
    assert compare.differences(whole, part, cut_short=True) == []
    assert "rank 0: the end was not reached" in compare.differences(whole, part)


@pytest.fixture
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_who_may_strike_when(store: Any) -> None:
    """Ranks 0 and 2 are peers, 1 and 3."""
    session: Any = SimpleNamespace(world=SimpleNamespace(generations=Generations(store), grids=Grids.of(Grid.of(4, 2))))
    ledger = _Ledger(session, "x")

    def enter(number: int, rank: int, point: Any, step: int, spaced: bool = True) -> bool:
        return ledger.enter(number, InjectedFault("kill", rank, point), step, spaced)

    assert not enter(0, 0, "forward", 5)  # before the fit
    store.set(PHASE, "fit")
    assert enter(0, 0, "forward", 5)
    assert not enter(0, 0, "forward", 50)  # never again
    assert not _Ledger(session, "x").enter(0, InjectedFault("kill", 0, "forward"), 50, True)  # nor in a replacement
    assert [enter(1, 1, "forward", step) for step in (4, 5, 6)] == [False] * 3
    assert not enter(2, 2, "repair", 5)  # the peer of one that is lost
    assert enter(3, 1, "repair", 5)
    assert not enter(4, 0, "resume", 5)  # the third in one recovery
    assert not enter(4, 0, "resume", 9)  # no recovery of a random fault
    assert enter(5, 2, "forward", 5, spaced=False)
    assert enter(1, 1, "forward", 7)
    store.set(PHASE, "done")
    assert not enter(6, 1, "forward", 90)


def test_it_changes_nothing_but_what_it_breaks(tmp_path: Path) -> None:
    """No gradient is gathered for it, no weight looked at; and its hooks are gone with the fit."""
    injector, module = FaultInjector("kill:0:forward:0"), L.LightningModule()
    module.layer = torch.nn.Linear(1, 1)
    trainer = L.Trainer(accelerator="cpu", callbacks=[injector, Fingerprint(tmp_path)], logger=CSVLogger(tmp_path))
    assert who_sees_gradients(trainer, module) is None
    assert not may_change_weights(trainer, module)
    logger, other = trainer.loggers[0], FaultInjector()
    for injectors in ((injector, other), (other, injector)):
        injector.on_fit_start(trainer, module)
        other.on_fit_start(trainer, module)
        assert _global_forward_hooks
        assert not module.layer._forward_hooks  # a checkpoint may pickle a layer
        assert "lr_scheduler_step" in vars(module)
        assert "log_metrics" in vars(logger)
        for each in injectors:  # in the order in which they came, and in the other
            each.teardown(trainer, module, "fit")
        assert not _global_forward_hooks
        assert "lr_scheduler_step" not in vars(module)
        assert "log_metrics" not in vars(logger)
        assert points._listeners == ()


def test_methods_of_one_object_s_own_come_back(tmp_path: Path) -> None:
    """Who has put a method of its own into an object, before us or after, finds it there afterwards."""
    trainer, module = L.Trainer(accelerator="cpu", logger=CSVLogger(tmp_path)), L.LightningModule()
    first, second, scheduler = FaultInjector(), FaultInjector(), cast("Any", None)
    seen: list[str] = []
    module.lr_scheduler_step = own = lambda *_: seen.append("own")  # type: ignore[method-assign]
    first.on_fit_start(trainer, module)
    before = module.lr_scheduler_step

    @functools.wraps(before)
    def later(*args: Any) -> None:
        seen.append("later")
        before(*args)

    module.lr_scheduler_step = later  # type: ignore[method-assign, assignment]
    second.on_fit_start(trainer, module)
    module.lr_scheduler_step(scheduler, None)
    assert seen == ["later", "own"]
    first.teardown(trainer, module, "fit")
    second.teardown(trainer, module, "fit")
    assert module.lr_scheduler_step is later
    module.lr_scheduler_step(scheduler, None)
    assert seen == ["later", "own"] * 2
    module.lr_scheduler_step = own  # type: ignore[method-assign]
    first.on_fit_start(trainer, module)
    first.teardown(trainer, module, "fit")
    assert module.lr_scheduler_step is own


def test_faults_in_words() -> None:
    faults = (InjectedFault("kill", 2, "forward", 30), InjectedFault("hang", 0, "regroup", 1, after_s=2.5))
    assert parse_all("kill:2:forward:30, hang:0:regroup:1:2.5") == faults == parse_all(map(str, faults))
    assert parse_all(["kill:2:forward:30", faults[1]]) == faults
    assert parse_all("") == ()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FaultInjector("murder:2:forward:30"), "kind='murder' must be one of 'kill'"),
        (lambda: FaultInjector("kill:2:here:30"), "point='here' must be one of 'batch_start'"),
        (lambda: FaultInjector("kill:-1:forward:30"), "rank=-1 must be a whole number"),
        (lambda: FaultInjector(["kill:1:forward:-3"]), "step=-3 must be a whole number"),
        (lambda: FaultInjector("kill:1:forward"), "'kill:1:forward' is not a fault. Write kind:rank:point:step"),
        (lambda: FaultInjector("kill:1:forward:1:nan"), "after_s=nan must be"),
        (lambda: InjectedFault("kill", True, "forward"), "rank=True must be"),
        (lambda: FaultInjector(mtbf_steps=0), "mtbf_steps=0 must be a number above 0"),
        (lambda: FaultInjector(mtbf_s=float("inf")), "mtbf_s=inf must be a number above 0"),
        (lambda: FaultInjector(mtbf_steps=1, mtbf_s=1), "exclude each other"),
        (lambda: FaultInjector(mtbf_steps=1, count=0), "count=0"),
        (lambda: FaultInjector(seed=-1), "seed=-1"),
        (lambda: FaultInjector(kinds=["murder"]), "kinds='murder' must be one of"),  # type: ignore[list-item]
        (lambda: FaultInjector(points=[]), "points is empty"),
        (lambda: FaultInjector(kinds=["corrupt"], points=["update"]), "found only at batch_start"),
        (lambda: Fingerprint("x", every_n_steps=0), "every_n_steps=0"),
    ],
)
def test_bad_input(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_another_strategy(tmp_path: Path) -> None:
    for callback in (FaultInjector("kill:0:forward:0"), Fingerprint(tmp_path)):
        trainer = L.Trainer(
            accelerator="cpu", max_steps=1, callbacks=[callback], logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        with pytest.raises(ConfigurationError, match=r"needs `Trainer\(strategy='replica_zero'\)`"):
            callback.setup(trainer, L.LightningModule(), "fit")


def test_draws() -> None:
    dice = Dice(7, ("kill", "corrupt", "sigterm"), FAULT_POINTS)
    due = [(step, 0.0) for step in range(200)]
    drawn = dice.draw(due, 4)
    assert (
        drawn
        == Dice(7, ("kill", "corrupt", "sigterm"), FAULT_POINTS).draw(due, 4)
        != Dice(8, dice.kinds, FAULT_POINTS).draw(due, 4)
    )
    assert {fault.rank for fault in drawn} == {0, 1, 2, 3}
    assert all(fault.kind != "sigterm" for fault in drawn[:-1])
    assert not {"update", "stop"} & {fault.point for fault in drawn if fault.kind == "corrupt"}
    last = {"forward": 150, "epoch_end": 10}
    aimed = dice.draw(due, 4, last)
    assert all(fault.step <= last[fault.point] for fault in aimed if fault.point not in PHASES)
    assert {fault.point for fault in aimed} >= {"forward", "epoch_end", "regroup"}
    assert aimed[-1].point not in PHASES  # there is no recovery after the last one
    times = dice.arrivals(5.0, 2000)
    assert 4.5 < times[-1] / 2000 < 5.5
    assert times == sorted(times)
    assert len(dice.spread(20, 100)) == 20


class Stubborn(torch.Tensor):
    def detach(self) -> Any:
        raise AssertionError("code of the user's class has run")


def test_digests_call_no_code_of_the_user() -> None:
    values = torch.ones(2)
    assert digest(values.as_subclass(Stubborn)) == digest(values)


def test_digests() -> None:
    zero, minus = torch.zeros(()), -torch.zeros(())
    different = [zero, minus, zero.double(), zero[None], [zero], 0, 0.0, False, None, "0", b"0", np.zeros(1), {"a": 1}]
    assert len({digest(value) for value in different}) == len(different)
    assert digest({"a": [zero]}) == digest({"a": (zero.clone(),)})
    assert digest(object()) == digest(object())
    assert issubclass(Injected, RuntimeError)
    assert 0 < EXIT_CODE < 126


class Layered(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())


def test_modules_and_layers_can_be_pickled_and_copied() -> None:
    """A checkpoint may hold layers among the hyperparameters, and a callback may copy the module."""
    places: list[str] = []

    class Seen(FaultPointCallback):
        def reach(self, trainer: Any, point: Any) -> None:
            places.append(point)

    module: Any = Layered()
    seen = Seen()
    trainer: Any = SimpleNamespace(training=True, loggers=[])
    seen.on_fit_start(trainer, module)
    try:
        copies = [pickle.loads(pickle.dumps(module)), copy.deepcopy(module)]
        module.net(torch.ones(2))
        assert places == ["forward", "forward"]
        for each in copies:
            each.net(torch.ones(2))
            with pytest.raises(AttributeError, match="step"):
                each.lr_scheduler_step(None, None)
        assert places == ["forward", "forward"]
        module.net[0].weight.sum().backward()
        assert places[2:] == ["backward"]
    finally:
        seen.teardown(trainer, module, "fit")
    module.net(torch.ones(2))
    assert places[3:] == []


def test_copies_keep_a_method_of_the_object_s_own() -> None:
    module: Any = Layered()
    module.lr_scheduler_step = step = lambda *_: "own"
    trainer: Any = SimpleNamespace(training=True, loggers=[])
    injector = FaultInjector()
    injector.on_fit_start(trainer, module)
    try:
        assert copy.deepcopy(module).lr_scheduler_step is step
    finally:
        injector.teardown(trainer, module, "fit")
