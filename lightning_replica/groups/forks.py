"""Protects children of this process from destroying its process groups.

[Note: forks] A process group's destructor waits for the group's threads. A child that was forked, such as a worker of a
DataLoader, has none of them: it would wait for ever, or crash. A child destroys a group if its garbage collector finds
a reference cycle that the parent has left and that holds the group; an exception's traceback is often such a cycle. So
whatever exists when a child is forked is out of the reach of the child's garbage collector.
"""

import functools
import gc
import os


@functools.cache
def leave_groups_to_this_process() -> None:
    """Keep children that are forked from now on from destroying objects of this process."""
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_child=gc.freeze)
