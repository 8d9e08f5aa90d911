"""The secret of a job: processes that have it can tell each other's values in a store from those of strangers."""

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from lightning_replica.errors import ConfigurationError

VARIABLE: Final = "LIGHTNING_REPLICA_SECRET"
FILE_VARIABLE: Final = "LIGHTNING_REPLICA_SECRET_FILE"
_LEAST: Final = 16  # characters
_ADVICE: Final = "`openssl rand -hex 32` makes a good one. Give the same one to all nodes."


def own_secret(environment: Mapping[str, str] = os.environ) -> bytes:
    """Return the secret that this process was started with; empty if it has none.

    Args:
        environment: The environment variables, of which one holds the secret or names a file that does.

    Raises:
        ConfigurationError: If both variables are set, the file cannot be read, or the secret is too short.
    """
    secret, file = environment.get(VARIABLE), environment.get(FILE_VARIABLE)
    if secret is None and file is None:
        return b""
    if secret is not None and file is not None:
        raise ConfigurationError(f"{VARIABLE} and {FILE_VARIABLE}={file!r} are both set: set one of them only.")
    where = VARIABLE if file is None else f"{FILE_VARIABLE}={file!r}"
    try:
        found = (secret if file is None else Path(file).read_text()) or ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{where}: the secret cannot be read: {error}. {_ADVICE}") from error
    if len(found.strip()) < _LEAST:
        raise ConfigurationError(
            f"{where}: the secret has {len(found.strip())} characters, but needs {_LEAST} or more. {_ADVICE}"
        )
    return found.strip().encode()


def make_secret() -> None:
    """Give this process, and those that it starts, a secret of their own, unless it was started with one."""
    if VARIABLE not in os.environ and FILE_VARIABLE not in os.environ:
        os.environ[VARIABLE] = secrets.token_hex(32)


def name_of(secret: bytes) -> str:
    """Return a name for a secret that does not give it away; empty if there is none."""
    return hmac.digest(secret, b"name", hashlib.sha256).hex()[:16] if secret else ""
