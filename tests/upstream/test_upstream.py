"""torch's and FairScale's own tests against `ReplicaOptimizer`, where their files are; see `run`."""

import os
from pathlib import Path

import pytest

from tests.upstream import expected, run

FOLDER = os.environ.get("LIGHTNING_REPLICA_UPSTREAM")


@pytest.mark.skipif(
    FOLDER is None, reason="LIGHTNING_REPLICA_UPSTREAM names no folder with torch's and FairScale's tests"
)
@pytest.mark.parametrize("subject", [subject for subject in run.SUBJECTS if subject != run.OWN])
@pytest.mark.parametrize("file", run.FILES)
def test_they_end_as_expected(file: str, subject: str) -> None:
    assert FOLDER is not None
    if run.FILES[file] == "FairScale":
        pytest.importorskip("fairscale")
    found = run.outcomes(Path(FOLDER) / file, subject)
    assert len(found) > 10
    wrong = [
        f"{test} {outcome}, but should have {expected.reason(test, run.SUBJECTS[subject])[0]}:\n{error}"
        for test, (outcome, error) in found.items()
        if outcome != expected.reason(test, run.SUBJECTS[subject])[0]
    ]
    assert not wrong, "\n".join(wrong)


def rows() -> list[list[str]]:
    return [line[2:-2].split(" | ") for line in run.PAGE.read_text().splitlines() if line.startswith(("| t", "| F"))]


def test_the_page_gives_a_reason_for_each_test_that_does_not_pass() -> None:
    assert len(rows()) > 20
    for _, test, _, *ended, why in rows():
        assert bool(why) == any("passed" not in each for each in ended), test


def test_the_page_knows_what_is_expected() -> None:
    reasons = {row[-1] for row in rows() if row[-1]}
    assert reasons == {*(expected.FAIL | expected.FAIL_WITH_HOLDERS | expected.SKIP).values()}


def test_a_test_with_parameters_is_expected_to_end_as_its_name_says() -> None:
    assert expected.reason("test_empty_shard[gloo]") == ("passed", "")
    assert expected.reason("test_empty_shard[nccl]")[0] == "skipped"
    assert expected.reason("test_step_with_closure")[0] == "skipped"
    assert expected.reason("TestZeroRedundancyOptimizerDistributed::test_ddp_zero_overlap_use_gpu_True")[0] == "failed"
