"""The interface of a storage: objects, refs, leases and scratch folders are four separate protocols.

The only implementation keeps all four in one folder of a file system (``storage.store.Store``).
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
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

    def discard_scratch(self, stage_key: str) -> None:
        """Remove the scratch folder."""


class Storage(Objects, Refs, Leases, Scratch, Protocol):
    """The storage that an attempt needs."""


def open_storage(address: str) -> Storage:
    """The storage at an address: a folder's path."""
    return Store(Path(address))
