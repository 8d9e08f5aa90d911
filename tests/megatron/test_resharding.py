"""Checkpoints load into other sizes of tensor, pipeline, data and expert parallelism."""

from dataclasses import replace

import pytest

from tests.megatron.convert import convert
from tests.megatron.job import Case

BASE = Case(devices=4, plain=True, replicas=1)
DENSE = {
    "data": BASE,
    "tensor": replace(BASE, tensor=2),
    "pipeline": replace(BASE, pipeline=2, replicas=2),
    "both": replace(BASE, tensor=2, pipeline=2),
}
GATED = {name: replace(case, gated=True) for name, case in DENSE.items() if name != "both"}
EXPERTS = {
    "one": replace(BASE, experts=True),
    "two": replace(BASE, expert=2, pipeline=2),
    "four": replace(BASE, expert=4),
    "cut": replace(BASE, expert=2, experts_tensor=2),
}


WITH_HEAD = {name: replace(case, head=True) for name, case in DENSE.items()}


LARGE = pytest.mark.combinations


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(WITH_HEAD, id="dense", marks=LARGE),
        pytest.param(GATED, id="gated"),
        pytest.param(EXPERTS, id="experts", marks=LARGE),
    ],
)
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What ranks say when each division loads what each has written."""
    cases, folder = request.param, tmp_path_factory.mktemp("saved")
    jobs = [("save", case, folder / name) for name, case in cases.items()]
    jobs += [("load", case, folder / name) for case in cases.values() for name in cases]
    names = [f"{name} saves" for name in cases] + [f"{there} in {here}" for here in cases for there in cases]
    found = convert(4, jobs)
    return {name: [each[number] for each in found] for number, name in enumerate(names)}


def test_every_division_loads_every_other(said: dict[str, list[str]]) -> None:
    """To the last bit: parameters, and the optimizer's state. The same four ranks do it all."""
    assert said == dict.fromkeys(said, ["", "", "", ""])
