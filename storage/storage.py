"""The port behind which artifacts lie: objects, refs, leases and scratch folders are four different things.

Today all four are one folder of a file system (``storage.store.Store``).
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
        """A local folder with the artifact's files, to be read only."""


class Refs(Protocol):
    """Which object a stage key stands for."""

    def lookup(self, stage_key: str) -> Lookup:
        """Find and verify; what is damaged is moved aside, so that the stage can run again."""

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
        """Make the files of a staging folder an object that the stage key stands for; see ``Store.commit``."""


class Leases(Protocol):
    """Who works on a stage key, and which attempt is the newest."""

    def exclusive(
        self,
        stage_key: str,
        *,
        holder: str,
        on_wait: Callable[[str], None] | None = None,
        timeout: float | None = None,
    ) -> AbstractContextManager[None]:
        """Be the only one who works on the key; see ``Store.exclusive``."""

    def next_attempt(self, stage_key: str) -> int:
        """Count a new attempt, 1 at first, and fence off every earlier one for good."""


class Scratch(Protocol):
    """Local folders of the machine that computes."""

    def staging_folder(self, stage_key: str, attempt: int) -> Path:
        """An empty folder for the attempt's files."""

    def scratch_folder(self, stage_key: str) -> Path:
        """What all attempts at the key share: checkpoints, journal, progress. Made where it is not there."""

    def has_scratch(self, stage_key: str) -> bool:
        """Whether an attempt has left something there."""

    def discard_scratch(self, stage_key: str) -> None:
        """Remove it."""


class Storage(Objects, Refs, Leases, Scratch, Protocol):
    """All four, as one attempt needs them."""


def open_storage(address: str) -> Storage:
    """The storage at an address: a folder's path."""
    return Store(Path(address))
