"""megatron-core's own checkpoints: it loads what we export, and we load what it has written."""

import pytest

from lightning_replica.cli.main import main
from tests.megatron.convert import convert
from tests.megatron.test_resharding import DENSE, EXPERTS, GATED

# With all experts on each rank, megatron-core's optimizer state has another form.
PARALLEL = {name: case for name, case in EXPERTS.items() if name != "one"}
Said = dict[str, list[str]]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """What ranks say when each division loads what the other side has written under one of them."""
    folder = tmp_path_factory.mktemp("torch_dist")
    kinds = {"dense": DENSE, "gated": GATED, "experts": PARALLEL}
    saved = {"dense": DENSE["tensor"], "gated": GATED["pipeline"], "experts": EXPERTS["two"]}
    jobs = [("save", case, folder / f"our {name}") for name, case in saved.items()]
    saved["experts"] = EXPERTS["cut"]  # of two stages, megatron-core saves one tied embedding, with wrong values
    jobs += [("save by megatron", case, folder / f"their {name}" / "iter_0000003") for name, case in saved.items()]
    found = {"all save": [text for each in convert(4, jobs) for text in each if text]}
    jobs = []
    for name, cases in kinds.items():
        ours, theirs = folder / f"our {name}", folder / f"their {name}"
        exported, imported = folder / f"exported {name}", folder / f"imported {name}"
        (theirs / "latest_checkpointed_iteration.txt").write_text("3")  # as megatron's training loop does
        assert main(["export", "--format", "megatron", str(ours), str(exported)]) == 0
        assert main(["import", str(theirs), str(imported)]) == 0
        assert (exported / "latest_checkpointed_iteration.txt").read_text() == "3"
        jobs += [("load by megatron", case, exported / "iter_0000003") for case in cases.values()]
        jobs += [("load", case, imported / "step_00000003") for case in cases.values()]
    each_says = convert(4, jobs)
    for number, (what, case, path) in enumerate(jobs):
        key = f"{path.parent.name} {what} TP{case.tensor} PP{case.pipeline} EP{case.expert} ETP{case.experts_tensor}"
        found[key] = [text for each in each_says if (text := each[number])]
    return found


@pytest.mark.combinations
def test_both_directions_to_the_last_bit(said: Said) -> None:
    """Weights, main parameters, the optimizer's state and its steps."""
    assert len(said) == 21
    assert {key: texts for key, texts in said.items() if texts} == {}
