"""Ranks that hang while a checkpoint is saved: replaced, and what is on the disk in the end is as if they had not."""

import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.local import LocalFileOpener
from lightning.pytorch.callbacks import Callback

from lightning_replica.checkpoint import publish, verification
from lightning_replica.checkpoint.export import read_whole
from lightning_replica.core.points import listen
from tests.support import job, world
from tests.support.bits import same
from tests.support.job import Case

STEP = 4


@dataclass
class Saves(Case):
    """``rank`` stops, or goes round in circles, once it is saving the checkpoint of `STEP` and has come to ``place``.

    Places: "hook" (``on_save_checkpoint``), "pickle" (half of the content is), "file" (the file is written, not yet in
    its place), "parts" (of a sharded checkpoint, every rank's), "directory" (of the same, it is staged).
    """

    form: str = "full"
    rank: int = -1
    place: str = ""
    stops: bool = True


class Hangs(Callback):
    """Comes to places; in the checkpoint, a thing that does so when it is pickled."""

    def __init__(self, case: Saves, out: Path) -> None:
        self.case, self.marker, self.saving = case, out / "fired", False
        listen(lambda point: self.come_to("parts") if point == "save" else None)

    def come_to(self, place: str) -> None:
        here = self.saving and (int(os.environ["LOCAL_RANK"]), place) == (self.case.rank, self.case.place)
        if here and not self.marker.exists():
            self.marker.touch()
            if self.case.stops:
                os.kill(os.getpid(), signal.SIGSTOP)
            while True:
                pass

    def __reduce__(self) -> Any:
        self.come_to("pickle")
        return list, ()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.saving = trainer.global_step == STEP
        if self.saving and not self.marker.exists() and self.case.place == "pickle":
            checkpoint["hangs"] = self
        self.come_to("hook")


def train(case: Saves, out: Path) -> None:
    hangs = Hangs(case, out)

    def before(owner: Any, name: str, place: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def replaced(*args: Any) -> Any:
            hangs.come_to(place)
            return original(*args)

        setattr(owner, name, replaced)

    before(LocalFileOpener, "commit", "file")
    before(publish, "write_file", "directory")
    job.watch_closely(case.rank, 3.0)
    job.run(case, out, (hangs,), state_dict_type=case.form)


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[world.Outcome, Path]]:
    made = {}
    for form in ("full", "sharded"):
        out = tmp_path_factory.mktemp(form)
        made[form] = world.run(Saves(form=form), out, target=train), out
    return made


def saved(out: Path, form: str) -> dict[str, Any]:
    """Everything in the folder of checkpoints, by name; whatever is not whole raises."""
    read = {}
    for path in (out / "checkpoints").iterdir():
        if form == "sharded":
            verification.verify(path)
            read[path.name] = read_whole(path)
        else:
            read[path.name] = torch.load(path, weights_only=True)
    return read


CASES = [
    Saves(rank=0, place="pickle"),
    Saves(rank=0, place="file", stops=False),
    Saves(rank=2, place="hook", stops=False),
    Saves(rank=0, place="directory", form="sharded", stops=False),
    Saves(rank=3, place="parts", form="sharded"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.form}-{case.place}-{case.rank}")
def test_hang(case: Saves, oracles: dict[str, tuple[world.Outcome, Path]], tmp_path: Path) -> None:
    outcome = world.run(replace(case, hang=(20.0, 40.0)), tmp_path, target=train)
    untouched, before = oracles[case.form]
    outcome.assert_same(untouched)
    assert len(outcome.said) == 2, outcome.said
    assert outcome.said[0].startswith(f"Rank {case.rank} hangs while saving a checkpoint "), outcome.said
    assert ("stopped by a signal" if case.stops else "in come_to\n") in outcome.said[0]
    replaced = rf"Rank {case.rank} hangs .* and was killed; a new process takes its place \(1 of 3\)\."
    assert re.fullmatch(replaced, outcome.said[1]), outcome.said
    found, expected = saved(tmp_path, case.form), saved(before, case.form)
    assert found.keys() == expected.keys()
    for name, content in found.items():
        for part in ("state_dict", "optimizer_states"):
            assert same(content[part], expected[name][part]), (name, part)
