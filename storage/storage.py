"""The interface of a storage: objects, refs, leases and scratch folders are four separate protocols.

One folder of a file system holds all four (``storage.store.Store``). A bucket holds the first three, and a copy of the
scratch folders of attempts that go on (``storage.object_storage.ObjectStorage``).
"""

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from schemas.records.artifacts import Artifact
from storage.refs import Lookup
from storage.store import Store


class Objects(Protocol):
    """Immutable folders of files, named by their content."""

    def folder(self, artifact: Artifact) -> Path:
        """A local folder with the artifact's files, for reading."""


class Refs(Protocol):
    """Stage key → object."""

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
    ) -> AbstractContextManager[None]:
        """Hold exclusive access to the key; see ``Store.exclusive``."""

    def next_attempt(self, stage_key: str) -> int:
        """Number of a new attempt, from 1; earlier attempts can no longer commit."""


class Scratch(Protocol):
    """Local folders on the machine that computes."""

    def staging_folder(self, stage_key: str, attempt: int) -> Path:
        """An empty folder for the attempt's files."""

    def scratch_folder(self, stage_key: str) -> Path:
        """The folder that all attempts at the key share (checkpoints, journal, progress); created if missing."""

    def has_scratch(self, stage_key: str) -> bool:
        """Whether the scratch folder exists."""

    def keep_copy(self, stage_key: str, names: Collection[str]) -> AbstractContextManager[None]:
        """While the block runs, keep a copy of these files and folders of the scratch folder for other machines."""

    def discard_scratch(self, stage_key: str) -> None:
        """Remove the scratch folder."""


class Storage(Objects, Refs, Leases, Scratch, Protocol):
    """The storage that an attempt needs."""


def open_storage(address: str) -> Storage:
    """The storage at an address: a folder's path, or ``s3://…``, ``gs://…``, ``az://…``.

    Objects of buckets are cached in ``$VANTAGE_CACHE``, or else ``~/.cache/vantage``, up to ``$VANTAGE_CACHE_GB``
    (``storage.object_cache``). Credentials, region and endpoint are those of the environment (``AWS_…``, ``GOOGLE_…``,
    ``AZURE_…``).

    Raises:
        ValueError: the address is none of these, or the bound is no number.
    """
    if "://" not in address:
        return Store(Path(address))
    from storage.bucket import open_bucket
    from storage.object_cache import ObjectCache, max_bytes_from
    from storage.object_storage import ObjectStorage

    root = Path(os.environ.get("VANTAGE_CACHE") or Path.home() / ".cache" / "vantage")
    objects = ObjectCache(root, max_bytes=max_bytes_from(os.environ))
    return ObjectStorage(
        open_bucket(address), root / sha256(address.encode()).hexdigest()[:16], objects=objects
    )
