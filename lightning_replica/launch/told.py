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
    """

    options: RecoveryOptions
    directory: str = ""

    def tell(self, store: Store) -> None:
        """Tell the supervisor, unless another rank has."""
        store.compare_set(_KEY, "", json.dumps([asdict(self.options), self.directory]))

    @classmethod
    def ask(cls, store: Store) -> "Told | None":
        """Return what the ranks have told; None if nobody has yet."""
        if not store.check([_KEY]):
            return None
        options, directory = json.loads(store.get(_KEY))
        return cls(RecoveryOptions(**options), directory)
