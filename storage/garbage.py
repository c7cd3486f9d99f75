"""What a storage holds that may no longer be needed, and its removal beside running attempts.

Whoever is about to use a stage key writes it down first, then holds the key, then looks it up. Whoever removes a ref
holds the key first, then asks what is needed. So one of the two sees the other. An object goes only while nobody can
commit an equal one, after the refs were read again.
"""

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from vantage.storage.refs import Ref

HOLDER = "vantage gc"

BATCH = 16
"""Stage keys that are held at once while refs are removed."""

Needed = Callable[[], Collection[str]]
"""Asked while the key or the object is held: what must stay."""


@dataclass(frozen=True)
class Leftover:
    """Something outside of refs and objects: scratch and staging folders, damaged things that were set aside."""

    name: str
    num_bytes: int
    stage_key: str | None = None
    """Held while it is removed; None: nobody uses it."""
    is_scratch: bool = False
    """Attempts at the key may go on from it, or the runs that need the key read it."""
    is_committed: bool = False
    """The newest attempt at the key has committed, and the storage has what others read of this scratch folder."""
    age_seconds: float | None = None
    """By the storage's own clock, where the age decides."""


class Garbage(Protocol):
    """The removable content of a storage."""

    @property
    def patience_seconds(self) -> float:
        """Return how long after a first try to wait for keys and objects whose holders may be dead."""

    def refs(self) -> Mapping[str, Ref]:
        """Return stage key → ref, of those that can be read."""

    def objects(self) -> Mapping[str, int]:
        """Return digest → bytes, also of objects that are not whole."""

    def leftovers(self) -> Collection[Leftover]:
        """Return everything else that may be removed."""

    def records(self) -> Mapping[str, int]:
        """Return digest → bytes of what stays of removed artifacts (``vantage.storage.removed``)."""

    def remove_refs(self, stage_keys: Collection[str], *, needed: Needed) -> list[str]:
        """Write down and remove refs that are not needed and on whose keys nobody works; the keys of those that are gone."""

    def remove_object(self, digest: str, *, needed: Needed) -> bool:
        """Write down and remove an object unless it is needed, or is being committed; whether it is gone."""

    def remove_leftover(self, leftover: Leftover, *, needed: Needed) -> bool:
        """Remove it unless its key is needed, or somebody works on the key; whether it is gone."""


def batches(stage_keys: Collection[str]) -> Iterator[list[str]]:
    """Return the keys in order, ``BATCH`` at a time."""
    ordered = sorted(stage_keys)
    return (ordered[start : start + BATCH] for start in range(0, len(ordered), BATCH))


def bytes_in(path: Path) -> int:
    """Return bytes of a file, or of all files in a folder; what vanishes meanwhile counts nothing."""
    total = 0
    if not path.is_dir() or path.is_symlink():
        with suppress(FileNotFoundError):
            total = path.lstat().st_size
        return total
    for root, _, files in os.walk(path):
        for name in files:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(root, name)).st_size
    return total
