"""Read and replace small JSON records on object storage; only a process that has read the newest version can replace it.

The conditional writes are those of the storage itself (etags; generations on Google Cloud Storage), so two machines agree
without a connection to each other.
"""

from dataclasses import dataclass
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, NotFoundError, PreconditionError
from obstore.store import ObjectStore as Remote


class Conflict(RuntimeError):
    """Another writer was faster: the record has changed since it was read."""


class BucketNotFound(RuntimeError):
    """The bucket does not exist, or the login has no access to it."""


@dataclass(frozen=True)
class Version:
    """Version of a record that was read."""

    e_tag: str | None
    version: str | None


def read_record(remote: Remote, path: str) -> tuple[bytes | None, Version | None]:
    """Return a record with its version; (None, None) if there is none."""
    try:
        found = obstore.get(remote, path)
    except (NotFoundError, FileNotFoundError):
        return None, None
    return bytes(found.bytes()), _version(found.meta)


def replace_record(remote: Remote, path: str, data: bytes, version: Version | None) -> Version:
    """Write a record in place of the version that was read; None: it must not exist yet.

    Raises:
        Conflict: the record has another version by now.
        BucketNotFound: the bucket does not exist.
    """
    mode: Any = "create"
    if version is not None:
        mode = {name: value for name, value in vars(version).items() if value is not None}
    try:
        return _version(obstore.put(remote, path, data, mode=mode))
    except (AlreadyExistsError, PreconditionError) as error:
        raise Conflict(f"{path} was written by another meanwhile") from error
    except (NotFoundError, FileNotFoundError) as error:
        if version is not None:
            raise Conflict(f"{path} was removed by another meanwhile") from error
        raise BucketNotFound(str(error).splitlines()[0]) from error


def _version(meta: Any) -> Version:
    return Version(meta.get("e_tag"), meta.get("version"))
