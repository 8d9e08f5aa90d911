"""How many files and sockets a process may have open at once."""

import resource
from typing import Final

_ENOUGH: Final = 65_536  # some programs try to close every descriptor that there could be, so no more than that


def raise_limit() -> None:
    """Raise this process's soft limit to its hard limit; processes that it starts inherit it.

    A rank has about 2.5 sockets for each other rank, a supervisor 4 for each of its own. 1024 is a usual soft limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
