"""docs/mindio.md: every name of this package in it exists, and its example does what the page says."""

import argparse
import ast
import inspect
import json
import re
import signal
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

import lightning_replica
from lightning_replica import MegatronReplicaStrategy, ReplicaZeroStrategy, callbacks, exit_codes
from lightning_replica.cli import main, run
from lightning_replica.recovery.context import RecoveryContext
from lightning_replica.recovery.incident import Incident
from tests.support import job, world
from tests.support.doubles import overriding
from tests.support.job import Fault

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "mindio.md"
STRATEGIES = (ReplicaZeroStrategy, MegatronReplicaStrategy)
# Where a name with nothing in front of it may be from, and what the first part of a dotted name stands for.
PLACES = (lightning_replica, callbacks, lightning_replica.RecoveryCallback, L, L.LightningModule, signal.Signals)
ROOTS: dict[str, Any] = {
    "context": RecoveryContext,
    "exit_codes": exit_codes,
    "incident": Incident,
    "torch": torch,
    "trainer": L.Trainer,
}


def rows() -> list[list[str]]:
    """The rows of the tables: what MindIO has, what stands for it, and the phase if there is one."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line[2:].removesuffix("|").split(" | ")] for line in lines]
    return [row for row in cells if row[0] != "MindIO"]


def spans() -> list[str]:
    """What is marked as code outside of MindIO's column and the example."""
    text = re.sub(r"```.*?```|^\| .*?$", "", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"`([^`]+)`", " ".join([text, *(row[1] for row in rows())]))
    return sorted({span for span in found if not span.startswith("tft_")})


def has(owner: Any, name: str) -> bool:
    return hasattr(owner, name) or name in getattr(owner, "__annotations__", {})  # a field without a default


@cache
def source() -> str:
    return "".join(path.read_text() for path in Path(lightning_replica.__file__).parent.rglob("*.py"))


def parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


def find(node: ast.expr) -> list[Any]:
    """The things that an expression may name; none if nothing has that name."""
    if isinstance(node, ast.Call):
        given = {keyword.arg for keyword in node.keywords}
        positional = [argument.id for argument in node.args if isinstance(argument, ast.Name)]
        return [thing for thing in find(node.func) if given.union(positional) <= parameters(thing)]
    if isinstance(node, ast.Attribute):
        owners = STRATEGIES if ast.unparse(node.value) == "trainer.strategy" else find(node.value)
        return [getattr(owner, node.attr, None) for owner in owners if has(owner, node.attr)]
    assert isinstance(node, ast.Name)
    if node.id in ROOTS:
        return [ROOTS[node.id]]
    places = [getattr(place, node.id) for place in PLACES if hasattr(place, node.id)]
    is_variable = node.id.startswith("LIGHTNING_REPLICA_") and f'"{node.id}"' in source()
    return [*places, node.id] if is_variable or is_option(node.id) else places


def is_option(name: str) -> bool:
    return any(name in parameters(strategy) for strategy in STRATEGIES)


def is_command(words: list[str]) -> bool:
    top = main.parser()
    (commands,) = [action for action in top._actions if isinstance(action, argparse._SubParsersAction)]
    if words[0] not in commands.choices:
        return False
    parser = run.parser() if words[0] == "run" else commands.choices[words[0]]
    known = {option for action in parser._actions for option in action.option_strings}
    return all(word in known for word in words[1:] if word.startswith("--"))


def exists(span: str) -> bool:
    if span.startswith("lightning-replica "):
        return is_command(span.split()[1:])
    if "/" in span:
        return (ROOT / span).exists()
    (statement,) = ast.parse(span).body
    if isinstance(statement, ast.Assign):
        return all(isinstance(target, ast.Name) and is_option(target.id) for target in statement.targets)
    assert isinstance(statement, ast.Expr)
    return bool(find(statement.value))


@pytest.mark.parametrize("span", spans())
def test_a_name_exists(span: str) -> None:
    assert exists(span), f"docs/mindio.md names `{span}`, which does not exist"


@pytest.mark.parametrize(
    "span",
    [
        "on_recovery_halt",
        "context.ranks",
        "incident.levels",
        "exit_codes.FINE",
        "copies=2",
        "LIGHTNING_REPLICA_TLS",
        "DyingGaspCheckpoint(grace=1)",
        "register_fault(pattern, state)",
        "trainer.strategy.scatter_all",
        "lightning-replica pause PID",
        "lightning-replica run --backup-nodes 1",
        "tests/callbacks/test_no_page.py",
    ],
)
def test_a_wrong_name_would_be_found(span: str) -> None:
    assert not exists(span)


def test_every_row_says_something() -> None:
    assert len(rows()) > 40
    for row in rows():
        assert len(row) in (2, 3), row
        assert row[0], row
        assert row[1], row


def example() -> Any:
    """The class of the page's example."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    return names["Totals"]


def train(case: job.Case, out: Path) -> None:
    """The target of `world.run`."""

    @overriding()
    class Watched(example()):  # type: ignore[misc]
        def on_recovery_clean(self, trainer: Any, pl_module: Any, context: Any) -> None:
            assert self.thread is None

        def on_recovery_resume(self, trainer: Any, pl_module: Any, context: Any) -> None:
            super().on_recovery_resume(trainer, pl_module, context)
            assert self.thread.is_alive()
            (out / f"recovered{context.rank}").write_text(context.kind)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            super().on_train_end(trainer, pl_module)
            assert self.thread is None
            (out / f"totals{trainer.global_rank}.json").write_text(json.dumps(self.totals.tolist()))

    job.run(case, out, (Watched(12, lambda totals: (out / "sent").touch(), 0.01),))


def totals(out: Path) -> list[list[float]]:
    return [json.loads((out / f"totals{rank}.json").read_text()) for rank in range(2)]


CASE = job.Case(devices=2)  # six steps in each of two epochs


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, world.Outcome]:
    out = tmp_path_factory.mktemp("untouched")
    outcome = world.run(CASE, out, target=train)
    assert outcome.code == 0, outcome.logs
    first, second = totals(out)
    assert first == second
    assert all(first)
    assert (out / "sent").exists()
    return out, outcome


@pytest.mark.parametrize(
    ("point", "kind"), [("before_commit", "batch"), ("train_batch_end", "tail")], ids=["batch", "tail"]
)
@pytest.mark.parametrize("resumed", [False, True], ids=["whole", "resumed"])
def test_the_example(
    point: str, kind: str, resumed: bool, untouched: tuple[Path, world.Outcome], tmp_path: Path
) -> None:
    """The sums of all steps that a run has made, also where it has begun after the sixth."""
    case, begun = CASE, 0
    if resumed:
        first = world.run(replace(CASE, epochs=1), tmp_path / "first", target=train)
        assert first.code == 0, first.logs
        (checkpoint,) = (tmp_path / "first" / "checkpoints").iterdir()
        case, begun = replace(CASE, load=str(checkpoint)), 6
    step = 8 - begun if point in job.INSIDE else 8  # the engine counts the steps of a fit, the trainer those of all
    faulty = replace(case, faults=(Fault("kill", 1, point, step),))
    outcome = world.run(faulty, tmp_path / "faulty", target=train)
    assert outcome.code == 0, outcome.logs
    if not resumed:
        outcome.assert_same(untouched[1])
    assert [(tmp_path / "faulty" / f"recovered{rank}").read_text() for rank in range(2)] == [kind, kind]
    expected = [[0.0] * begun + each[begun:] for each in totals(untouched[0])]
    assert totals(tmp_path / "faulty") == expected, outcome.logs
