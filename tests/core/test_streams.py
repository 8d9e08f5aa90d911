"""A process without some standard stream, or whose reader has gone."""

import os
import subprocess
import sys

import pytest

COMPLETE = """
import os, sys
from lightning_replica.core import streams
streams.complete()
streams.flush()
print("nobody reads this")
sys.stderr.write("nor this")
for descriptor in range(3):
    os.fstat(descriptor)
assert sys.stdin.read() == ""
sys.exit(3)
"""
UNREAD = """
import sys
from lightning_replica.core import streams
print("nobody reads this")
sys.stdin.read()
{}
sys.exit(75)
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed(closed: str) -> None:
    command = f'exec "$0" -c "$1" {closed}'
    done = subprocess.run(["sh", "-c", command, sys.executable, COMPLETE], stdin=subprocess.DEVNULL, timeout=60)
    assert done.returncode == 3


@pytest.mark.parametrize(("call", "code"), [("", 120), ("streams.flush()", 75)])
def test_the_exit_code_is_kept_though_nobody_reads(call: str, code: int) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    process = subprocess.Popen(
        [sys.executable, "-c", UNREAD.format(call)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.close()
    process.stdin.close()
    assert process.wait(60) == code
