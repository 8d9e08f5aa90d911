"""A run that leaves files in the repository fails, and says which."""

import subprocess
from pathlib import Path

import pytest

from tests import conftest
from tests.support.tidy import strewn

pytest_plugins = "pytester"


def commit(root: Path) -> None:
    git = ["git", "-c", "user.name=n", "-c", "user.email=e"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *command], cwd=root, check=True)


def test_what_is_strewn(tmp_path: Path) -> None:
    assert strewn(tmp_path) == set()
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_one.py").touch()
    commit(tmp_path)
    (tmp_path / "tests" / "test_two.py").touch()  # being written
    (tmp_path / ".pytest_cache").mkdir()
    assert strewn(tmp_path) == set()
    (tmp_path / "replica_stacks" / "1-rank0").mkdir(parents=True)
    (tmp_path / "replica_stacks" / "1-rank0" / "rank0.txt").touch()
    (tmp_path / "last.ckpt").touch()
    (tmp_path / "outputs").mkdir()
    assert strewn(tmp_path) == {"replica_stacks/1-rank0/rank0.txt", "last.ckpt", "outputs"}


def test_such_a_run_fails(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "ROOT", pytester.path)
    pytester.makeconftest("from tests.conftest import *")
    pytester.makepyfile(test_one="def test_one(): pass", test_litter="def test_litter(): open('left', 'w').close()")
    commit(pytester.path)
    clean = pytester.runpytest_inprocess("-p", "no:cacheprovider", "test_one.py")
    assert clean.ret == pytest.ExitCode.OK
    done = pytester.runpytest_inprocess("-p", "no:cacheprovider", "test_litter.py")
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    done.stdout.fnmatch_lines(["*The run has left files in the repository*", "left", "*1 passed*"])
