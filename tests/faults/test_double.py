from pathlib import Path
import pytest
from tests.support import job, world
from tests.support.job import Case, Fault
from tests.faults.test_matrix import untouched, check

@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("point", ["stop","clean","regroup","repair","rollback","resume"])
@pytest.mark.parametrize("kind", ["kill","raise"])
def test_second(kind, point, rank, untouched, tmp_path):
    outcome = world.run(Case(faults=(Fault("kill", 1, "backward", 2),Fault(kind,rank,point,2))), tmp_path)
    check(outcome, untouched)
