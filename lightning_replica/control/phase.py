"""The phase of a run, from set-up to end."""

from typing import Literal, TypeAlias

from lightning_replica.control import keys
from lightning_replica.stores.interface import Store

Phase: TypeAlias = Literal["set-up", "fit", "done"]
"""Before the first batch, from then to the end of `fit`, or after it. A lost rank can be replaced in "fit" only."""


def phase_of(store: Store) -> Phase:
    """Return the phase that ranks have written to the store; "set-up" if they have written none."""
    return phase_from(store.get(keys.PHASE)) if store.check([keys.PHASE]) else "set-up"


def phase_from(value: bytes) -> Phase:
    """Return the phase that the value of `keys.PHASE` says."""
    return "fit" if value == b"fit" else "done" if value == b"done" else "set-up"
