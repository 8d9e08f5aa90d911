"""The storage of a location: a file system, or a store of objects."""

from lightning_replica.checkpoint.disk import Disk
from lightning_replica.checkpoint.location import Location, Url
from lightning_replica.checkpoint.object_store import ObjectStore
from lightning_replica.checkpoint.storage import Files, Readable, Storage


def storage_of(location: Location) -> Storage:
    """Return what can be done at a location."""
    return ObjectStore(location) if isinstance(location, Url) else Disk(location)


def files_of(directory: Readable) -> Files:
    """Return the files directly in ``directory``."""
    return directory if isinstance(directory, Files) else storage_of(directory).files()
