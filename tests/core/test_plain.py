"""What ranks send each other: every bit arrives, and nothing that comes is run."""

import ast
import collections
import datetime
import io
import math
import os
import pathlib
import pickle
import re
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lightning_replica
from lightning_replica.core import plain
from lightning_replica.errors import RecoveryError, TransferError
from lightning_replica.state.data.fetches import Fetching
from lightning_replica.state.data.position import LoaderState
from lightning_replica.state.snapshot import (
    Components,
    ForReplacement,
    Private,
    Progress,
    Replicated,
    _warned,
    pack_for_replacement,
)


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
NUMBERS = st.sampled_from("?bHlefdgFDm").flatmap(
    lambda code: st.binary(min_size=16, max_size=32).map(lambda data: np.frombuffer(data[:16] * 2, code)[0])
)
KEYS = st.text() | st.integers() | st.just("!")
VALUES = st.recursive(
    SCALARS | NUMBERS,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner),
    max_leaves=12,
)


@given(VALUES)
def test_every_bit_of_plain_data_arrives(value: Any) -> None:
    assert _shown(plain.unpack(plain.pack(value))) == _shown(value)


LISTS = st.recursive(
    SCALARS | st.just('"!": ') | st.just({"!": "bytes", "size": 0}),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.just("!"), inner),
    max_leaves=12,
)


@given(LISTS)
def test_every_bit_of_lists_and_dicts_arrives(value: Any) -> None:
    assert _shown(plain.unpack(plain.pack_lists(value))) == _shown(value)
    with_tensors = [value, torch.arange(3.0), value]
    assert _shown(plain.unpack(plain.pack_lists(with_tensors))[::2]) == _shown([value, value])


def _shown(value: Any) -> Any:
    """Types and bits, so that -0.0, every NaN and True differ from what they compare equal to."""
    if isinstance(value, np.generic):
        return (type(value), value.dtype.str, value.tobytes())
    if isinstance(value, float):
        return ("float", bits(value))
    if isinstance(value, (list, tuple)):
        return (type(value), [_shown(item) for item in value])
    if isinstance(value, dict):
        return ("dict", [(_shown(key), _shown(item)) for key, item in value.items()])
    return (type(value), value)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(math.nan),
        torch.tensor([0xFFC01234, 0x7F800001], dtype=torch.int64).to(torch.int32).view(torch.float32),
        torch.arange(6, dtype=torch.bfloat16).view(2, 3).t(),
        torch.zeros(0, 3),
        torch.tensor(7),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]).conj(),
        torch.ones(3, requires_grad=True),
    ],
)
def test_every_bit_of_a_tensor_arrives(tensor: torch.Tensor) -> None:
    (came,) = plain.unpack(plain.pack([tensor]))
    assert (came.dtype, came.shape, came.requires_grad) == (tensor.dtype, tensor.shape, False)
    flat = tensor.detach().resolve_conj().reshape(-1)
    assert came.reshape(-1).view(torch.uint8).tolist() == flat.view(torch.uint8).tolist()


@given(st.binary() | st.binary().map(lambda tail: plain.pack([b"x", torch.ones(2)])[:-3] + tail))
def test_anything_else_is_refused(data: bytes) -> None:
    if data == plain.pack([b"x", torch.ones(2)]):
        return
    try:
        plain.unpack(data)
    except TransferError:
        return
    assert data[:4] == b"LRP1"  # another tail of the right length is other data, which checksums are for


def test_what_cannot_be_packed_is_named() -> None:
    with pytest.raises(plain.NotPlainError, match=r"it holds a pathlib\.(_local\.)?PosixPath"):
        plain.pack({"a": [1, pathlib.PosixPath("x")]})


def test_another_version_is_refused() -> None:
    with pytest.raises(TransferError, match=r"Data begins with b'LRP9' .* b'LRP1' .* were expected"):
        plain.unpack(b"LRP9" + plain.pack(1)[4:])


def test_more_types_can_be_saved() -> None:
    value = {
        "path": pathlib.PurePosixPath("a/b"),
        "when": datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc),
        "array": np.arange(3, dtype=np.float32),
        "score": np.float64(0.1),
        "order": collections.OrderedDict(a=1),
        "seen": {1, 2},
    }
    came = plain.load(plain.save(value))
    assert came.pop("array").tolist() == value.pop("array").tolist()
    assert came == value


def test_what_lay_on_a_device_that_is_not_here_arrives_all_the_same() -> None:
    """The device is that of another rank: its number means nothing here."""
    value = {"a": torch.arange(5.0), "b": torch.ones(2, 3)}
    written = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(plain.save(value))) as saved, zipfile.ZipFile(written, "w") as elsewhere:
        for name in saved.namelist():
            content = saved.read(name)
            if name.endswith("data.pkl"):
                assert content.count(b"X\x03\x00\x00\x00cpu") == 1
                content = content.replace(b"X\x03\x00\x00\x00cpu", b"X\x07\x00\x00\x00cuda:63")
            elsewhere.writestr(name, content)
    came = plain.load(written.getvalue())
    assert came.keys() == value.keys()
    assert all(torch.equal(came[key].cpu(), value[key]) for key in value)


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (self.path,))


def test_nothing_that_comes_is_run(tmp_path: Path) -> None:
    target = tmp_path / "made"
    with pytest.raises(plain.NotPlainError, match=r"it holds posix\.mkdir"):
        plain.save([Evil(str(target))])
    torch.save([Evil(str(target))], tmp_path / "evil")
    for data in ((tmp_path / "evil").read_bytes(), pickle.dumps(Evil(str(target)))):
        with pytest.raises(TransferError):
            plain.load(data)
        with pytest.raises(TransferError):
            plain.unpack(data)
    assert not target.exists()


def test_a_callback_that_cannot_be_sent_is_named() -> None:
    callbacks = {"Mine": {"state": {"x": Evil("x")}}, "Other": {"state": {}}}
    progress = Progress({}, {}, False, [], [], [], 1)
    replicated = Replicated(progress, Components([], {}, callbacks, {}, []))
    with pytest.raises(RecoveryError, match=r"the state of 'Mine' cannot be sent, it holds posix\.mkdir"):
        pack_for_replacement(replicated, ForReplacement())


def test_what_of_a_metric_cannot_be_mirrored_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """But for what it has computed, which it computes again."""
    _warned.clear()
    metrics = [{"total": torch.tensor(2), "seen": Evil("x"), "_computed": Evil("x")}]
    for _ in range(2):
        back = Private.unpack(bytes(Private(b"random", metric_states=metrics).pack()))
        assert back.metric_states == [{"total": torch.tensor(2)}]
    assert caplog.text.count("Not exact after a fault: the metric state 'seen': it holds") == 1
    assert "_computed" not in caplog.text


@pytest.mark.parametrize("value", [0.1 + 0.2, math.inf, -math.nan])
def test_results_keep_every_bit(value: float) -> None:
    taken = Private(b"random", [{"key": "loss", "tensors": {"value": ["float32", value], "x": None}}])
    taken.loaders = [LoaderState(3, b"a", None, (b"b", None), True), LoaderState(0)]
    taken.fetching = Fetching({"_idx": 3, "_consumed": [True, False]}, (b"c",))
    back = Private.unpack(bytes(taken.pack()))
    assert _shown(back.results) == _shown(taken.results)
    assert (back.loaders, back.rng) == (taken.loaders, b"random")
    assert back.fetching == taken.fetching
    assert [type(state) for state in back.loaders] == [LoaderState, LoaderState]


UNPICKLES = re.compile(r"(pickle|marshal|dill|shelve)\.(loads?|Unpickler)|(gather|broadcast|scatter)_object(_list)?$")


def calls_that_unpickle(path: Path) -> list[str]:
    """Calls, and base classes, that would run what a pickle says; ``torch.load`` unless with ``weights_only=True``."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name, keywords = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
            if UNPICKLES.search(name) or (name == "torch.load" and keywords.get("weights_only") != "True"):
                found.append(name)
        elif isinstance(node, ast.ClassDef):
            found += [name for name in map(ast.unparse, node.bases) if UNPICKLES.search(name)]
    return found


def test_the_package_unpickles_nothing() -> None:
    """But a checkpoint's index and megatron-core's files, through unpicklers that know nothing else."""
    package = Path(lightning_replica.__file__).parent
    found = {str(path.relative_to(package)): calls_that_unpickle(path) for path in package.rglob("*.py")}
    known = {"_compat/torch.py": ["pickle.Unpickler", "pickle.Unpickler", "torch.load"]}
    assert {name: calls for name, calls in found.items() if calls} == known
