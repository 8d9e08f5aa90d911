"""Follows the log of generations of the run, and copies it to the store of this node, where its ranks read it."""

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final, TypeAlias

import torch.distributed as dist

from lightning_replica.control import keys
from lightning_replica.control.faults import Fault
from lightning_replica.control.generation import Generations
from lightning_replica.stores.interface import Store

Entry: TypeAlias = Callable[[int, Fault, str], None]
"""Called with each new generation, the fault that began it and the note for supervisors."""

_PAUSE_S: Final = 0.2


class Log:
    """Waits for entries of the log and for the verdict, in threads of its own. It does not poll.

    Args:
        open_store: Opens a new connection to the newest store of the run. Raises OSError or DistError if there is none.
        open_near: Opens a new connection to the store of this node.
        entry: See `Entry`. Called in a thread.
        broken: Called in a thread when a connection breaks: the process that served the store may have ended.
    """

    def __init__(
        self,
        open_store: Callable[[], Store],
        open_near: Callable[[], Store],
        entry: Entry,
        broken: Callable[[], None] = lambda: None,
    ) -> None:
        self._open, self._open_near, self._entry, self._broken = open_store, open_near, entry, broken
        self._read, self._stopped = 0, False

    def follow(self) -> None:
        """Start the threads."""
        for name, work in (("log", self._follow), ("verdict", self._copy_verdict)):
            target = partial(self._again_and_again, work)
            threading.Thread(target=target, name=f"lightning_replica-{name}", daemon=True).start()

    def stop(self) -> None:
        """Stop when the store is gone. As long as it answers, threads may wait for it."""
        self._stopped = True

    def _again_and_again(self, work: Callable[[Store, Store], None]) -> None:
        """Do ``work`` over a new connection whenever one breaks. If the store is gone, `Heartbeats` finds that out."""
        while not self._stopped:
            try:
                work(self._open(), self._open_near())
                return
            except (OSError, dist.DistError):
                self._broken()
                time.sleep(_PAUSE_S)

    def _follow(self, store: Store, near: Store) -> None:
        generations = Generations(store)
        while not self._stopped:
            number = self._read + 1
            fault, note = generations.fault_and_note(number)
            if store.check([keys.VERDICT]):  # the last entry of a run that is given up: its ranks look for the verdict
                self._copy_verdict(store, near)
            near.set(keys.generation(number), fault.to_json())
            self._read = number
            self._entry(number, fault, note)

    def _copy_verdict(self, store: Store, near: Store) -> None:
        near.set(keys.VERDICT, store.get(keys.VERDICT))
