"""The interface of a storage: objects, refs, leases and scratch folders are four separate protocols.

One folder of a file system holds all four (``vantage.storage.store.Store``). A bucket holds the first three, and a copy
of the scratch folders of running attempts (``vantage.storage.object_storage.ObjectStorage``).
"""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vantage.schemas.records.artifacts import Artifact
from vantage.storage.garbage import Garbage
from vantage.storage.machine_cache import cache_root
from vantage.storage.measured_file import Sealed
from vantage.storage.refs import Lookup, Ref
from vantage.storage.removed import Cause
from vantage.storage.store import Store
from vantage.storage.store_garbage import StoreGarbage

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Remote  # takes a moment to load


class Readable(Protocol):
    """The part of a storage that readers need, even if it is read-only: its files, and which objects exist."""

    @property
    def remote(self) -> "Remote":
        """The storage's folder or bucket as object storage."""

    def has_object(self, digest: str) -> bool:
        """Return whether there is an object of this digest; its files are not checked."""


class Objects(Protocol):
    """Immutable folders of files, named by their content."""

    def folder(self, artifact: Artifact) -> Path:
        """Return a local folder with the artifact's files, for reading. Raises DamagedObject if they cannot be used."""

    def local_folder(self, digest: str) -> Path | None:
        """Return the object's folder if this machine has it already; nothing is fetched or checked."""

    def has_object(self, digest: str) -> bool:
        """Return whether there is an object of this digest; its files are not checked."""

    def sealed(self, digest: str) -> Sealed:
        """Return metrics of an object, from its own files. Raises ValueError or OSError if it is missing or does not
        match the digest."""

    def read_file(self, digest: str, path: str) -> bytes | None:
        """Return a small file of an object, checked; None: the object has no file of that name. Raises ValueError or
        OSError as above."""

    def verify(self, artifact: Artifact) -> list[str]:
        """Return problems of the artifact's files, all of which are read; empty: intact."""

    def check_sizes(self, artifact: Artifact) -> list[str]:
        """Return problems of the artifact's files that can be seen from names and sizes."""


class Refs(Protocol):
    """Stage key → object."""

    def find(self, stage_key: str) -> Ref | None:
        """Return the ref of a stage key, or None; the artifact's files are not checked. Raises DamagedRef if the ref
        cannot be used."""

    def inspect(self, stage_key: str) -> Lookup:
        """Look up as ``lookup`` does, without changing anything."""

    def lookup(self, stage_key: str) -> Lookup:
        """Find and verify; a damaged artifact is moved away, so that the stage can run again."""

    def commit(
        self,
        folder: Path,
        *,
        stage_key: str,
        attempt: int,
        run_id: str,
        description: Mapping[str, Any],
        key_parts: Mapping[str, Any],
        provenance: Mapping[str, Any],
    ) -> Artifact:
        """Make the staging folder an object and point the stage key to it; see ``Store.commit``."""


class Leases(Protocol):
    """Exclusive access to stage keys, and attempt numbers."""

    def exclusive(
        self,
        stage_key: str,
        *,
        holder: str,
        on_wait: Callable[[str], None] | None = None,
        timeout: float | None = None,
    ) -> AbstractContextManager[object]:
        """Hold exclusive access to the key; see ``Store.exclusive``."""

    def holder_of(self, stage_key: str) -> str | None:
        """Return the name of the living holder of the key; None: there is none."""

    def next_attempt(self, stage_key: str) -> int:
        """Return the number of a new attempt, from 1; earlier attempts can no longer commit."""


class Scratch(Protocol):
    """Local folders on the machine that computes."""

    def staging_folder(self, stage_key: str, attempt: int) -> Path:
        """Return an empty folder for the attempt's files."""

    def scratch_folder(self, stage_key: str) -> Path:
        """Return the folder that all attempts at the key share (checkpoints, journal, progress); created if missing."""

    def has_scratch(self, stage_key: str) -> bool:
        """Return whether the scratch folder exists."""

    def keep_copy(self, stage_key: str, names: Sequence[str]) -> AbstractContextManager[None]:
        """Keep a copy of these files and folders of the scratch folder for other machines, while the block runs."""

    def reports(self, stage_key: str, names: Collection[str]) -> Path:
        """Return a local folder with the newest of these files of the scratch folder, wherever the attempt runs; for reading."""

    def discard_scratch(self, stage_key: str) -> None:
        """Remove the scratch folder."""

    def discard_local_scratch(self, stage_key: str) -> None:
        """Remove this machine's scratch folder, unless other machines read it too; the caller holds the key."""


class Storage(Objects, Refs, Leases, Scratch, Protocol):
    """All parts of the storage that an attempt needs."""

    @property
    def address(self) -> str:
        """Return the address from which ``open_storage`` opens this storage on any machine that reaches it."""

    @property
    def remote(self) -> "Remote":
        """The storage's folder or bucket as object storage, for messages between machines."""


def open_storage(address: str) -> Storage:
    """Return the storage at an address: a folder's path, or a bucket's address (``vantage.storage.bucket``).

    Objects of buckets are cached in ``$VANTAGE_CACHE``, or else ``~/.cache/vantage``, up to ``$VANTAGE_CACHE_GB``
    (``vantage.storage.object_cache``). Credentials, region and endpoint are those of the environment (``AWS_…``, ``GOOGLE_…``,
    ``AZURE_…``).

    Raises:
        ValueError: the address is neither a path nor a bucket's address, or the bound is not a number.
    """
    if "://" not in address:
        return Store(Path(address))
    from vantage.storage.bucket import open_bucket
    from vantage.storage.object_cache import ObjectCache, max_bytes_from
    from vantage.storage.object_storage import ObjectStorage

    root = cache_root()
    objects = ObjectCache(root, max_bytes=max_bytes_from(os.environ))
    scratch = root / sha256(address.encode()).hexdigest()[:16]
    return ObjectStorage(open_bucket(address), scratch, address=address, objects=objects)


def garbage_of(storage: Storage, cause: Cause) -> Garbage:
    """Return the removable content of a storage; ``cause`` is written into the records of removed artifacts."""
    from vantage.storage.object_storage import ObjectStorage

    if isinstance(storage, ObjectStorage):
        return storage.garbage(cause)
    assert isinstance(storage, Store)
    return StoreGarbage(storage, cause)
