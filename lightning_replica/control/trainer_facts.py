"""What ranks report to the supervisor: the options of the trainer that they run.

The process that the user starts becomes the supervisor while its `Trainer` is constructed. So it has neither callbacks
nor a ``default_root_dir``. Its ranks have both. The first rank that calls `fit` (or a similar method) writes them here.
"""

import json
from dataclasses import asdict, dataclass

from lightning_replica.control import keys
from lightning_replica.core.options import RecoveryOptions
from lightning_replica.stores.interface import Store


@dataclass(frozen=True)
class TrainerFacts:
    """Facts that the supervisor needs from the ranks.

    Attributes:
        options: The recovery options of the strategy's arguments and the trainer's callbacks.
        directory: The trainer's ``default_root_dir``; if that is remote, the working directory.
        room: Number of empty lines below messages (`messages.leave_room`).
    """

    options: RecoveryOptions
    directory: str = ""
    room: int = 0

    def publish(self, store: Store) -> None:
        """Write this for the supervisor, unless another rank has."""
        store.compare_set(keys.OPTIONS, "", json.dumps([asdict(self.options), self.directory, self.room]))

    @classmethod
    def read(cls, store: Store) -> "TrainerFacts | None":
        """Return what a rank has written; None if no rank has yet."""
        if not store.check([keys.OPTIONS]):
            return None
        options, directory, room = json.loads(store.get(keys.OPTIONS))
        return cls(RecoveryOptions(**options), directory, room)
