"""What ranks tell the supervisor: the options of the trainer that they run.

The process that the user starts becomes the supervisor while its `Trainer` is constructed, and has neither callbacks
nor a ``default_root_dir``. Its ranks have both, and the first of them to call `fit` (or its like) says so here.
"""

import json
from dataclasses import asdict, dataclass

from lightning_replica.recovery.generation import Store
from lightning_replica.recovery.options import RecoveryOptions

_KEY = "options"


@dataclass(frozen=True)
class Told:
    """What the supervisor cannot know by itself.

    Attributes:
        options: What the strategy's arguments and the trainer's callbacks say about recovery.
        directory: The trainer's ``default_root_dir``; where that is remote, the working directory.
        room: Empty lines below messages (`messages.leave_room`).
    """

    options: RecoveryOptions
    directory: str = ""
    room: int = 0

    def tell(self, store: Store) -> None:
        """Tell the supervisor, unless another rank has."""
        store.compare_set(_KEY, "", json.dumps([asdict(self.options), self.directory, self.room]))

    @classmethod
    def ask(cls, store: Store) -> "Told | None":
        """Return what the ranks have told; None if nobody has yet."""
        if not store.check([_KEY]):
            return None
        options, directory, room = json.loads(store.get(_KEY))
        return cls(RecoveryOptions(**options), directory, room)
