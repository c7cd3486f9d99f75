"""Find and remove what a storage no longer needs, while attempts may be running.

A process that is about to use a stage key first records the key, then holds it, then looks it up. A process that
removes a ref first holds the key, then asks which keys are needed. So one of the two sees the other. An object is
removed only while no
process can commit an equal one, and after the refs were read again.
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
"""Number of stage keys that are held at once while refs are removed."""

Needed = Callable[[], Collection[str]]
"""Function that returns the keys or objects that must stay; it is called while the key or the object is held."""


@dataclass(frozen=True)
class Leftover:
    """Files outside of refs and objects: scratch and staging folders, and damaged files that were set aside."""

    name: str
    num_bytes: int
    stage_key: str | None = None
    """Key that is held while the leftover is removed; None: no process uses it."""
    is_scratch: bool = False
    """Whether it is a scratch folder: attempts at the key may go on from it, or runs that need the key read it."""
    is_committed: bool = False
    """Whether the newest attempt at the key has committed, and the storage has everything that others read of this
    scratch folder."""
    age_seconds: float | None = None
    """Age in seconds by the storage's own clock, if removal depends on the age; else None."""


class Garbage(Protocol):
    """The removable content of a storage."""

    @property
    def patience_seconds(self) -> float:
        """Return the seconds to wait, after a first try, for keys and objects whose holders may be dead."""

    def refs(self) -> Mapping[str, Ref]:
        """Return stage key → ref, for the refs that can be read."""

    def objects(self) -> Mapping[str, int]:
        """Return digest → bytes, also for incomplete objects."""

    def leftovers(self) -> Collection[Leftover]:
        """Return everything else that may be removed."""

    def records(self) -> Mapping[str, int]:
        """Return digest → bytes of the records of removed artifacts (``vantage.storage.removed``)."""

    def remove_refs(self, stage_keys: Collection[str], *, needed: Needed) -> list[str]:
        """Record and remove refs that are not needed and whose keys no attempt holds; returns the keys of the removed ones."""

    def remove_object(self, digest: str, *, needed: Needed) -> bool:
        """Record and remove an object unless it is needed or just being committed; returns whether it was removed."""

    def remove_leftover(self, leftover: Leftover, *, needed: Needed) -> bool:
        """Remove a leftover unless its key is needed or held; returns whether it was removed."""


def batches(stage_keys: Collection[str]) -> Iterator[list[str]]:
    """Return the keys in order, ``BATCH`` at a time."""
    ordered = sorted(stage_keys)
    return (ordered[start : start + BATCH] for start in range(0, len(ordered), BATCH))


def bytes_in(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder; files that vanish meanwhile are not counted."""
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
