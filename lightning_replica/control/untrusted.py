"""What a process does about a value in the store that no process of this package can have written there.

Anyone who can reach the port of a store can write to it. With a secret, what strangers write is ignored
(`stores.tagged`). Without one, a bad value must not end a process either. So it is named once, and the process goes on
as if there were another value.
"""

import json
from collections.abc import Callable
from typing import Any, TypeVar

from lightning_replica.core.messages import warn
from lightning_replica.errors import ProtocolError

T = TypeVar("T")
_reported: set[str] = set()  # keys: this process tells once of each


def from_json(value: bytes | str) -> Any:
    """Return the data that ``value`` says.

    Raises:
        ValueError: If it says none.
    """
    try:
        return json.loads(value)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read(key: str, value: bytes, parse: Callable[[bytes], T], otherwise: T) -> T:
    """Return what ``value`` means; ``otherwise`` if it means nothing.

    Args:
        key: The key that has the value, for the message.
        value: The value.
        parse: Returns what a value means. Raises `ProtocolError` if it means nothing.
        otherwise: What to go on with then.
    """
    try:
        return parse(value)
    except ProtocolError as error:
        if key not in _reported:
            _reported.add(key)
            warn(f"the value of the key {key!r} in the store cannot be used and is ignored: {error}")
        return otherwise
