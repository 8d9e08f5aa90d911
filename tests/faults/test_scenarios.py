"""Whatever trains, a fault in it leaves no trace: every scenario of tests/trainer, killed or made to raise."""

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_replica import DyingGaspCheckpoint, ReplicaZeroStrategy
from lightning_replica.core.points import listen
from tests.support import job, world
from tests.support.accelerators import accelerator
from tests.support.job import Case, Fault
from tests.support.trainers import state_of
from tests.trainer.both import different
from tests.trainer.scenarios import SCENARIOS, fit

# Its search for a learning rate is a fit inside the fit, from which a replacement would have to find its way.
NOT_YET = {"found_rate"}
NAMES = [name for name in SCENARIOS if name not in NOT_YET]
POINTS = [*job.INSIDE, "train_batch_end", "validation", "epoch_end"]


@dataclass
class Trained(Case):
    """A scenario with faults."""

    name: str = "plain"
    options: dict[str, Any] = field(default_factory=dict)
    saves: bool = False  # after each batch


def train(case: Trained, out: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["LOCAL_RANK"])
    place = out / f"cwd{rank}"
    place.mkdir(exist_ok=True)
    os.chdir(place)
    least, most = case.hang
    given = {"bucket_bytes": 512, "guard": "full", "hang_min_s": least, "hang_max_s": most, **case.options}
    strategy = ReplicaZeroStrategy(**given)

    callbacks = (
        Reaches(case, strategy, out),
        *([DyingGaspCheckpoint(out / "gasp", case.grace_s)] if case.gasp else ()),
        *([ModelCheckpoint(out / "saved", "{step}", every_n_train_steps=1, save_top_k=-1)] if case.saves else ()),
    )
    where = accelerator(case.accelerator)
    result = fit(case.name, strategy, case.devices, callbacks, load=case.load or None, accelerator=where)
    state = state_of(strategy)
    for number, sharded in enumerate(state.optimizers):
        result["tensors"].update({f"{number}/{key}": value for key, value in sharded.state()[0].items()})
    result["tensors"].update({f"main/{i}": buffers.main for i, buffers in enumerate(state.buffers)})
    result["tensors"]["random"] = torch.get_rng_state()
    torch.save(result, out / f"result{rank}.pt")


@dataclass
class Several(Case):
    """Scenarios without faults, one after the other in the same processes."""

    names: tuple[str, ...] = ()


def train_several(case: Several, out: Path) -> None:
    for name in case.names:
        torch._dynamo.reset()
        (out / name).mkdir(exist_ok=True)
        train(Trained(name=name, devices=case.devices), out / name)


@pytest.fixture(scope="module")
def untouched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each rank of two ends with, of all scenarios that tests of this session ask for."""
    items = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    asked = [item.callspec.params["name"] for item in items if "untouched" in item.fixturenames]  # type: ignore[attr-defined]
    out = tmp_path_factory.mktemp("untouched")
    case = Several(names=tuple(dict.fromkeys(asked)), devices=2)
    outcome = world.run(case, out, target=train_several)
    assert outcome.code == 0, outcome.logs
    return {name: loaded(out / name, case.devices) for name in case.names}


def loaded(out: Path, devices: int) -> list[dict[str, Any]]:
    return [torch.load(out / f"result{rank}.pt", weights_only=True) for rank in range(devices)]


class Reaches(Callback):
    """Reaches the points of the package, and points in the user's own code; "batch 4" is the fifth of its epoch."""

    def __init__(self, case: Case, strategy: ReplicaZeroStrategy, out: Path) -> None:
        self.case, self.strategy, self.out = case, strategy, out
        listen(self.reach)

    def reach(self, point: str) -> None:
        state = state_of(self.strategy) if self.strategy._training else None
        for number, fault in enumerate(self.case.faults):
            fault.reach(point, state.step if state else -1, self.out / f"fired{number}", state)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.reach(f"batch {batch_idx}")

    def on_train_batch_end(self, *args: Any) -> None:
        self.reach("train_batch_end")

    def on_validation_batch_end(self, trainer: Any, *args: Any) -> None:
        if not trainer.sanity_checking:
            self.reach("validation")

    def on_train_epoch_end(self, *args: Any) -> None:
        self.reach("epoch_end")


def results(case: Trained, out: Path) -> tuple[world.Outcome, list[dict[str, Any]]]:
    outcome = world.run(case, out, max_restarts=10, target=train)
    assert outcome.code == 0, outcome.logs
    return outcome, loaded(out, case.devices)


def assert_no_trace(case: Trained, out: Path, untouched: list[dict[str, Any]]) -> None:
    outcome, ranks = results(case, out)
    outcome.assert_in_step()
    assert "corrupted" not in outcome.logs, outcome.logs  # a guard that sees everything has seen nothing
    for rank, (got, expected) in enumerate(zip(ranks, untouched, strict=True)):
        assert different(got, expected) == [], f"rank {rank} of {case}\n{outcome.logs}"
    assert all((out / f"fired{number}").exists() for number in range(len(case.faults))), f"{case} was not reached"
    assert "recovered at step" in outcome.logs


def sample(name: str, kind: str) -> Fault:
    """A point, a rank and a step that differ from scenario to scenario but not from run to run."""
    number = zlib.crc32(f"{name}/{kind}".encode())
    point = POINTS[number % len(POINTS)]
    step = {"validation": 8, "epoch_end": 8}.get(point, 1 + number // 16 % 3)
    return Fault(kind, number // 64 % 2, point, step)


STEPS_OF_AN_EPOCH = {
    "accumulation": 3,
    "images_with_batch_norm": 4,
    "several_loaders": 8,
    "ends_early": 4,
    "stream_that_goes_on": 7,
    "curriculum_without_workers": 4,
    "curriculum_in_workers": 4,
    "curriculum_in_new_loaders": 4,
    "curriculum_in_persistent_workers": 4,
}
CHANGED = {"averaged_weights_with_batch_norm": 8}


def points(name: str) -> list[str]:
    """Where a fault may come. Who ends an epoch from its hook gets no validation there, as under DDP."""
    return [point for point in POINTS if (name, point) != ("ends_early", "validation")]


def fitting(name: str, fault: Fault) -> Fault:
    """Aims a fault at the end of the first epoch where its point is there only."""
    if fault.point in ("validation", "epoch_end"):
        fault.step = STEPS_OF_AN_EPOCH.get(name, 8)
    return fault


ENDS = [
    pytest.param(name, kind, marks=() if place % 2 == number else pytest.mark.combinations)
    for place, name in enumerate(sorted(NAMES))
    for number, kind in enumerate(("kill", "exception"))
]


@pytest.mark.parametrize(("name", "kind"), ENDS)
def test_a_kill_or_an_exception(name: str, kind: str, untouched: dict[str, list[Any]], tmp_path: Path) -> None:
    """Each scenario meets one of the two; the other behind the marker."""
    case = Trained((fitting(name, sample(name, kind)),), name=name, devices=2)
    assert_no_trace(case, tmp_path, untouched[name])


ON_DEVICES = {"manual_accumulation", "gan"}  # the others behind the marker


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ON_DEVICES else pytest.mark.combinations) for name in NAMES]
)
def test_errors_of_a_device(name: str, untouched: dict[str, list[Any]], tmp_path: Path) -> None:
    """On the simulated NPU: one that leaves all as it is, then one that takes the shard."""
    for kind in ("npu link", "npu uce 3 main"):
        case = Trained((fitting(name, sample(name, kind)),), name=name, devices=2, accelerator="simulated npu")
        assert_no_trace(case, tmp_path / kind, untouched[name])


def of_kind(beginning: str) -> list[str]:
    return [name for name in NAMES if name.startswith(beginning)]


def one_after_the_other(
    name: str, points: Sequence[str], first: int, untouched: dict[str, list[Any]], out: Path
) -> None:
    """Faults at all points strike one run, from step ``first`` on; each is a kill, then an exception."""
    for run, kinds in enumerate((("kill", "exception"), ("exception", "kill"))):
        faults = [
            Fault(kinds[number % 2], len(point) % 2, point, first + 2 * number) for number, point in enumerate(points)
        ]
        assert_no_trace(Trained(tuple(faults), name=name, devices=2), out / str(run), untouched[name])


@pytest.mark.parametrize("name", of_kind("gradients_seen"))
def test_code_that_looks_at_gradients_after_the_update(
    name: str, untouched: dict[str, list[Any]], tmp_path: Path
) -> None:
    """Gradients stay until the next step removes them."""
    points = ("batch 2", "train_batch_end", "batch_end", "batch_start")
    one_after_the_other(name, points, 2, untouched, tmp_path)


@pytest.mark.parametrize("name", of_kind("curriculum"))
def test_hooks_that_change_the_dataset(name: str, untouched: dict[str, list[Any]], tmp_path: Path) -> None:
    """Workers that start again copy what was there when their iteration began, not what hooks have changed since."""
    points = ("batch 2", "train_batch_end", "batch_start")  # in the second epoch and in the third
    one_after_the_other(name, points, 6, untouched, tmp_path)


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("curriculum")])
def test_a_stop_after_hooks_have_changed_the_dataset(
    name: str, untouched: dict[str, list[Any]], tmp_path: Path
) -> None:
    first = Trained((Fault("sigterm", 1, "batch 2", 6),), name=name, devices=2, gasp=True)
    assert world.run(first, tmp_path / "first", target=train).code == 75
    (saved,) = (tmp_path / "first" / "gasp").glob("step_*")
    _, ranks = results(Trained(name=name, devices=2, load=str(saved)), tmp_path / "then")
    for got, expected in zip(ranks, untouched[name], strict=True):
        assert different(got, expected) == []


@pytest.mark.parametrize("form", ["full", "sharded"])
@pytest.mark.parametrize(
    "name", ["two_paces", "gradients_removed_now_and_then", "gradients_seen_between_steps_by_hand"]
)
def test_a_checkpoint_holds_gradients_that_the_next_step_needs(
    name: str, form: str, untouched: dict[str, list[Any]], tmp_path: Path
) -> None:
    options = {"state_dict_type": form}
    results(Trained(name=name, devices=2, options=options, saves=True), tmp_path)
    for step in (1, 4):
        case = Trained(name=name, devices=2, options=options, load=str(tmp_path / "saved" / f"step={step}.ckpt"))
        outcome, ranks = results(case, tmp_path / str(step))
        for got, expected in zip(ranks, untouched[name], strict=True):
            assert different(got, expected) == []
        assert "Not exact" not in outcome.logs


AT_REST = [point for point in POINTS if point != "update"]
OLD_GRADIENTS = ("two_paces", "manual_accumulation", "gradients_removed_now_and_then")
CARRIES = [name for name in NAMES if name.startswith("gradients_seen") or name in OLD_GRADIENTS]


STOPS = [
    pytest.param(name, point, marks=() if place % 3 == number else pytest.mark.combinations)
    for place, name in enumerate(CARRIES)
    for number, point in enumerate(("train_batch_end", "batch 3", "before_commit"))
]


@pytest.mark.parametrize(("name", "point"), STOPS)
def test_a_stop_between_an_update_and_code_that_needs_its_gradients(
    name: str, point: str, untouched: dict[str, list[Any]], tmp_path: Path
) -> None:
    first = Trained((Fault("sigterm", 1, point, 3),), name=name, devices=2, gasp=True)
    stopped = world.run(first, tmp_path / "first", target=train)
    assert stopped.code == 75, stopped.logs
    (saved,) = (tmp_path / "first" / "gasp").glob("step_*")
    outcome, ranks = results(Trained(name=name, devices=2, load=str(saved)), tmp_path / "then")
    for got, expected in zip(ranks, untouched[name], strict=True):
        assert different(got, expected) == []
    assert "Not exact" not in outcome.logs


# More than one update in a batch, weights of the user's own, parameters of fewer bits than their shards.
FLIPPED = {
    "manual",
    "manual_accumulation",
    "gan",
    "half_mixed_manual",
    "clamped_weights",
    "bf16_true",
    "moving_average",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FLIPPED else pytest.mark.combinations) for name in NAMES]
)
def test_a_flipped_bit(name: str, untouched: dict[str, list[Any]], tmp_path: Path) -> None:
    """It is repaired, or overwritten lawfully before anybody reads it (values are adopted from weights)."""
    for number in range(2):
        chosen = zlib.crc32(f"{name}/flip{number}".encode())
        fault = Fault("corrupt", number, AT_REST[chosen % len(AT_REST)], 1 + chosen // 16 % 3)
        case = Trained((fitting(name, fault),), name=name, devices=2)
        outcome, ranks = results(case, tmp_path / str(number))
        for got, expected in zip(ranks, untouched[name], strict=True):
            assert different(got, expected) == [], f"{case}\n{outcome.logs}"
        assert (tmp_path / str(number) / "fired0").exists(), f"{case} was not reached"


def test_through_sockets(tmp_path: Path) -> None:
    """Where ranks cannot read each other's memory, points lie between messages instead of between reads."""
    options = {"shared_memory": False}
    _, untouched = results(Trained(name="clip_norm", devices=4, options=options), tmp_path / "untouched")
    _, shared = results(Trained(name="clip_norm", devices=4), tmp_path / "shared")
    assert [different(a, b) for a, b in zip(shared, untouched, strict=True)] == [[]] * 4
    for kind in ("kill", "exception"):
        places = enumerate(["reduction", "before_commit", "update", "gather"])
        faults = tuple(Fault(kind, number, point, 1 + number) for number, point in places)
        case = Trained(faults, name="clip_norm", devices=4, options=options)
        assert_no_trace(case, tmp_path / kind, untouched)


@pytest.mark.combinations
@pytest.mark.parametrize("options", [{"replicas": 2}, {"replicas": 4}, {"partition": "parameter"}], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_point(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    devices = 4
    _, untouched = results(Trained(name=name, devices=devices, options=options), tmp_path / "untouched")
    for number, point in enumerate(points(name)):
        for kind in ("kill", "exception"):
            step = None if point in ("validation", "epoch_end") else 1
            fault = Fault(kind, number % devices, point, step)
            case = Trained((fault,), name=name, devices=devices, options=options)
            assert_no_trace(case, tmp_path / f"{kind}-{point}", untouched)
