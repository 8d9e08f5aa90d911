"""The limit of open files, in a process of its own."""

import subprocess
import sys

CODE = """
import resource
from lightning_replica.core.descriptors import raise_limit
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
for most in (hard, 300, 200):
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, most), most))
    raise_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(most, 65536), most)
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
raise_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=100)
    assert done.stdout == "(200, 200)\n", done.stderr
