"""Before a fit writes to a directory of checkpoints: it can be written to, no other run does, and all ranks see it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from lightning_replica.checkpoint import lease
from lightning_replica.checkpoint.directory import CheckpointDirectory
from lightning_replica.control import agreement, keys
from lightning_replica.core.messages import warn
from lightning_replica.errors import CheckpointError, ConfigurationError
from lightning_replica.trainer.session import Session

_SEEN_AGAIN_S: Final = 2.0


def occupy(directory: CheckpointDirectory, number: int, session: Session, broadcast: Callable[[Any], Any]) -> None:
    """Prepare a directory on rank 0, and check it on all ranks. Collective.

    A replacement gets its predecessor's result, and is not refused.

    Args:
        directory: The directory.
        number: How many others this fit has begun to write to.
        session: The session of this process.
        broadcast: Returns rank 0's object on every rank.

    Raises:
        ConfigurationError: On every rank, if the directory cannot be written to, another run writes to it, or some rank
            does not see what rank 0 has written there.
    """
    begun = _begin(directory) if session.rank == 0 and not session.is_replacement else None
    problem, token = broadcast(begun)
    if problem is not None:
        raise ConfigurationError(problem)
    if isinstance(directory.path, Path):
        _share(directory.path, number, session, token)


def take_lease(directory: CheckpointDirectory) -> str:
    """Wait until no other run writes to the directory, and return the token of the lease. One rank calls this.

    A store of objects has no leases.

    Raises:
        ConfigurationError: If the directory cannot be written to, or another run goes on writing to it.
    """
    try:
        return lease.take(directory.path) if isinstance(directory.path, Path) else ""
    except (OSError, CheckpointError) as error:
        raise ConfigurationError(
            f"dirpath={str(directory.path)!r} cannot be written to: {error}. Choose another directory."
        ) from error


def _begin(directory: CheckpointDirectory) -> tuple[str | None, str]:
    try:
        token = take_lease(directory)
        directory.prepare()
    except ConfigurationError as error:
        return str(error), ""
    return None, token


def _share(path: Path, number: int, session: Session, token: str) -> None:
    name, advice = f"dirpath={str(path)!r}", "Let all nodes see one directory, or give the URL of an object store."
    if session.is_replacement:
        if not lease.share(path, token, _SEEN_AGAIN_S):  # the file may just be gone; the rank is needed in any case
            warn(
                f"{name} on node {agreement.node()}, where rank {session.rank} was replaced, does not hold what rank 0"
                f" has written there. If that is another directory, no further checkpoint will be whole. {advice}"
            )
        return
    sees = lease.share(path, token)

    def conclude(everyone: list[dict[str, Any]]) -> None:
        blind = {each["node"]: rank for rank, each in reversed(list(enumerate(everyone))) if not each["sees"]}
        if blind:
            nodes = ", ".join(f"{node} (rank {rank})" for node, rank in sorted(blind.items()))
            raise ConfigurationError(
                f"{name} is not one directory: what rank 0 has written there on node {everyone[0]['node']} is not seen"
                f" on node {nodes}. No checkpoint would be whole. {advice}"
            )

    session.agree(keys.directory(session.fits, number), {"sees": sees, "node": agreement.node()}, conclude)
