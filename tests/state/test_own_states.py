"""States that may differ from rank to rank: when they are copied and packed, what is left out, whose they become."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, WeightAveraging
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR, ReduceLROnPlateau

from lightning_replica.core import plain
from lightning_replica.core.inexact import Inexact
from lightning_replica.state import own_states
from lightning_replica.state.callback_state import CallbackStates
from lightning_replica.state.own_states import Logged, Own, States, put
from lightning_replica.state.snapshot import (
    Components,
    ForReplacement,
    Private,
    Progress,
    Replicated,
    Snapshot,
    pack_for_replacement,
    unpack_on_replacement,
)
from lightning_replica.trainer.saving import resume


class Counts(Callback):
    """A callback of the user's."""

    def __init__(self) -> None:
        self.state: Any = {"count": 1, "seen": [1, (2, 0.0)], "by_place": {3: "x"}, "mean": torch.ones(2)}

    def state_dict(self) -> Any:
        return self.state


def test_a_state_is_copied_and_packed_when_it_changes_only() -> None:
    counts, states = Counts(), States()
    first = states.take("counts", counts, counts.state)
    packed = states.packed("counts")
    assert states.take("counts", counts, counts.state) is first
    assert states.packed("counts") is packed
    assert plain.unpack(packed)["by_place"] == {3: "x"}


CHANGES = {
    "number": lambda state: state.update(count=2),
    "kind of a number": lambda state: state.update(count=True),
    "sign of a zero": lambda state: state.update(seen=[1, (2, -0.0)]),
    "list in place": lambda state: state["seen"].append(3),
    "key": lambda state: state["by_place"].update({3.5: state["by_place"].pop(3)}),
    "kind of a key": lambda state: state.update(by_place={3.0: "x"}),
    "order": lambda state: state.update(count=state.pop("count")),
    "tensor in place": lambda state: state["mean"].add_(1),
    "tensor unseen by its version": lambda state: state["mean"].data.mul_(2),
    "sign of a zero in a tensor": lambda state: state.update(mean=torch.tensor([1.0, -0.0])),
    "dtype": lambda state: state.update(mean=torch.ones(1, dtype=torch.float64)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_is_seen(change: Any) -> None:
    counts, states = Counts(), States()
    if change is CHANGES["sign of a zero in a tensor"]:
        counts.state["mean"] = torch.tensor([1.0, 0.0])
    before = states.take("counts", counts, counts.state)
    packed = states.packed("counts")
    change(counts.state)
    assert states.take("counts", counts, counts.state) is not before
    back = plain.unpack(states.packed("counts"))
    assert states.packed("counts") != packed
    assert shown(back) == shown(counts.state)


def shown(state: Any) -> str:
    return repr({name: value.numpy().tobytes() if name == "mean" else value for name, value in state.items()})


def cyclic() -> Any:
    state: dict[str, Any] = {}
    state["itself"] = state
    return state


NOT_MIRRORED = {
    "a large tensor": {"x": torch.zeros(20_000)},
    "a long list": {"x": list(range(20_000))},
    "long strings": {"x": ["y" * 1000] * 100},
    "escaped to be large": {"x": "\0" * 20_000},
    "an object": {"x": Path()},
    "itself": cyclic(),
}


@pytest.mark.parametrize("state", NOT_MIRRORED.values(), ids=NOT_MIRRORED)
def test_what_is_large_or_not_plain_is_not_mirrored(state: Any) -> None:
    inexact = Inexact()
    states = States("callback", inexact.report)
    taken = states.take("Counts", EarlyStopping("loss"), state)
    assert states.packed("Counts") == b""
    assert {name: finding.scope for name, finding in inexact.known.items()} == {
        "the state of callback Counts": "unknown"
    }
    assert list(taken) == list(state)  # but in the snapshot, whole
    assert taken is not state


@pytest.mark.parametrize("state", NOT_MIRRORED.values(), ids=NOT_MIRRORED)
def test_what_the_users_callbacks_refer_to_is_recorded_elsewhere(state: Any) -> None:
    counts, inexact = Counts(), Inexact()
    counts.state = state
    states = CallbackStates(inexact.report)
    assert states.take({counts.state_key: counts}) == {"Counts": None}
    assert (states.packed, inexact.known) == ([], {})


def test_a_callback_with_a_model_is_not_mirrored() -> None:
    averaging, states = WeightAveraging(), CallbackStates()
    averaging._average_model = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))
    taken = states.take({each.state_key: each for each in (averaging, Counts())})
    assert [key for key, _ in states.packed] == ["Counts"]
    assert "model" in taken["WeightAveraging"]


def logged(**values: Any) -> list[dict[str, Any]]:
    return [dict(values), {name: value for name, value in values.items() if name != "rate"}, {}]


def test_logged_values_keep_every_bit() -> None:
    values = {
        "loss": torch.tensor(0.1),
        "half": torch.tensor(0.1, dtype=torch.bfloat16),
        "wide": torch.tensor([0.1 + 0.2], dtype=torch.float64),
        "count": torch.tensor(2**60 + 1),
        "flag": torch.tensor(True),
        "nan": torch.tensor(math.nan),
        "inf": torch.tensor(-math.inf),
        "rate": 0.1,
        "!": 3,
    }
    packer = Logged()
    packed = packer.pack(logged(**values))
    assert packer.pack(logged(**values)) is packed
    replicated = {"logged": logged(loss=torch.tensor(7.0), theirs=1)}
    put(replicated, Own().pack([], [], [], packed))
    for back, own in zip(replicated["logged"], logged(**values), strict=True):
        assert list(back) == list(own)
        for name, value in own.items():
            assert type(back[name]) is type(value)
            if isinstance(value, torch.Tensor):
                assert (back[name].dtype, back[name].shape) == (value.dtype, value.shape)
                assert back[name].view(-1).view(torch.uint8).tolist() == value.view(-1).view(torch.uint8).tolist()
    changed = packer.pack(logged(**{**values, "loss": torch.tensor(0.2)}))
    put(replicated, Own().pack([], [], [], changed))
    assert replicated["logged"][1]["loss"].item() == torch.tensor(0.2).item()


def test_a_logged_value_that_is_not_plain_is_a_peers() -> None:
    packed = Logged().pack([{"a": Path(), "b": 1, "c": torch.zeros(1000), "d": 1j, "e": torch.empty(0, 2)}])
    replicated = {"logged": [{"a": "peer", "b": 2, "c": 3}]}
    put(replicated, Own().pack([], [], [], packed))
    assert replicated["logged"] == [{"a": "peer", "b": 1, "c": 3}]


def test_tensors_come_back_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device's rank: what lay on the device goes to this rank's own, what lay on the host stays there."""
    for module in (plain, own_states):
        monkeypatch.setattr(module, "on_host", lambda tensor: tensor.dtype != torch.float16)  # these are "away"
    monkeypatch.setattr(plain, "own_device", lambda: torch.device("meta"))
    counts, states = Counts(), CallbackStates()
    values = {"away": torch.ones((), dtype=torch.float16), "here": torch.ones(())}
    counts.state = dict(values)
    states.take({counts.state_key: counts})
    replicated: dict[str, Any] = {"callbacks": {}, "logged": [{}, {}, {}]}
    put(replicated, Own().pack([], states.packed, [], Logged().pack([values, {}, {}])))
    for back in (replicated["callbacks"]["Counts"]["state"], replicated["logged"][0]):
        assert {name: value.device.type for name, value in back.items()} == {"away": "meta", "here": "cpu"}
    assert plain.unpack(plain.pack(values))["away"].device.type == "cpu"  # unless that is asked for


def test_a_tensor_of_a_device_is_not_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Lightning's own callbacks keep is known by its version; what others keep is copied each time."""
    monkeypatch.setattr(own_states, "on_host", lambda _: False)
    stopping, states = EarlyStopping("val"), CallbackStates()
    with torch.inference_mode():
        stopping.best_score = torch.tensor(1.0)  # as after a validation: it has no version
    first = states.take({stopping.state_key: stopping})["EarlyStopping{'monitor': 'val', 'mode': 'min'}"]
    assert states.take({stopping.state_key: stopping}) == {stopping.state_key: first}
    assert states.take({stopping.state_key: stopping})[stopping.state_key] is first
    for stopping.best_score in (torch.tensor(1.0), torch.tensor(2.0)):
        following = states.take({stopping.state_key: stopping})[stopping.state_key]
        assert following is not first
    stopping.best_score.add_(1)
    assert states.take({stopping.state_key: stopping})[stopping.state_key] is not following
    counts = Counts()
    assert states.take({counts.state_key: counts})["Counts"] is not states.take({counts.state_key: counts})["Counts"]


def test_what_has_not_changed_is_not_joined_again() -> None:
    own, schedulers, logged = Own(), [b"a"], Logged()
    values = {"loss": torch.tensor(1.0)}
    first = own.pack(list(schedulers), [("key", b"b")], [], logged.pack([values, {}, {}]))
    assert own.pack(list(schedulers), [("key", b"b")], [], logged.pack([dict(values), {}, {}])) is first
    values["loss"] = torch.tensor(2.0)
    second = own.pack(list(schedulers), [("key", b"b")], [], logged.pack([values, {}, {}]))
    third = own.pack(list(schedulers), [("key", b"c")], [], logged.pack([values, {}, {}]))
    assert len({first, second, third, own.pack([], [], [], b"")}) == 4


def snapshot_of(score: float, states: CallbackStates, milestones: Any) -> Snapshot:
    stopping, checkpoint = EarlyStopping("val"), ModelCheckpoint(monitor="val")
    stopping.best_score = checkpoint.current_score = torch.tensor(score)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
    plateau, steps = ReduceLROnPlateau(optimizer), MultiStepLR(optimizer, milestones)
    plateau.best = score
    kept = States()
    schedulers = {str(place): each for place, each in enumerate((plateau, steps))}
    progress = Progress({}, {}, False, [{"val": torch.tensor(score)}, {}, {}], [], [], 1)
    components = Components(
        schedulers=[kept.take(place, each, each.state_dict()) for place, each in schedulers.items()],
        precision={},
        callbacks=states.take({each.state_key: each for each in (stopping, checkpoint)}),
        buffers={},
        momenta=[],
    )
    packed = [kept.packed(place) for place in schedulers]
    private = Private(b"random", own=Own().pack(packed, states.packed, [], Logged().pack(progress.logged)))
    return Snapshot("batch", 1, Replicated(progress, components), private)


def sent(peer: Snapshot, predecessor: Snapshot) -> Snapshot:
    from_peer = pack_for_replacement(peer.replicated, ForReplacement())
    return unpack_on_replacement("batch", 1, from_peer, bytes(predecessor.private.pack()))[0]


def scores(taken: Snapshot) -> list[float]:
    components = taken.replicated.whole()
    stopping, checkpoint = components.callbacks.values()
    best, current = stopping["state"]["best_score"], checkpoint["extras"]["current_score"]
    plateau, logged_values = components.schedulers[0], taken.replicated.progress.logged[0]
    return [best.item(), current.item(), plateau["best"], *logged_values.values()]


def test_a_replacement_has_its_own_over_a_peers_and_gives_it_on() -> None:
    own, peer = snapshot_of(1.0, CallbackStates(), [1]), snapshot_of(2.0, CallbackStates(), [3])
    first = sent(peer, own)
    second = sent(peer, first)  # lost again at once
    as_peer = sent(first, peer)  # and the peer then
    assert scores(first) == scores(second) == [1.0] * 4
    assert scores(as_peer) == [2.0] * 4
    assert first.replicated.whole().schedulers[1]["milestones"] == {3: 1}  # a Counter is not plain


def test_checkpoints_hold_nothing_of_it() -> None:
    taken = snapshot_of(1.0, CallbackStates(), [1])
    back = Private.unpack(bytes(taken.private.pack()))
    assert resume._private(taken.private) == resume._private(back) == resume._private(Private(b"random"))
