"""Find and remove what is no longer needed in a store on a file system (``vantage.storage.garbage``).

The locks are the kernel's: they cannot be lost while their holder lives, so the result of a check still
holds when it is used. Under the same locks, a record of a removed artifact (``vantage.storage.removed``) is written
before the removal.
"""

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from vantage.storage.digests import is_digest
from vantage.storage.durable_files import REMOVED, locked, remove_folder, sync_folder
from vantage.storage.garbage import HOLDER, Leftover, Needed, batches, bytes_in
from vantage.storage.key_locks import Locked
from vantage.storage.refs import DamagedRef, Ref
from vantage.storage.removed import REMOVED_FOLDER, Cause, RemovedFolder
from vantage.storage.store import Store


class StoreGarbage:
    """The removable content of a store."""

    def __init__(self, store: Store, cause: Cause) -> None:
        """Find garbage in a store. ``cause`` is written into the records of removed artifacts."""
        self._store = store
        self._cause = cause
        self._removed = RemovedFolder(store.root)
        self._root = store.root
        self._read: dict[str, tuple[object, Ref | None]] = {}
        """Stage key → status of the ref's file when it was last read, and the ref."""

    @property
    def patience_seconds(self) -> float:
        """Return 0: the locks of dead processes are free at once."""
        return 0.0

    def refs(self) -> Mapping[str, Ref]:
        """Return stage key → ref; files that have not changed since the last call are not read again."""
        found: dict[str, tuple[object, Ref | None]] = {}
        with os.scandir(self._root / "refs") as entries:
            for entry in entries:
                key = entry.name.removesuffix(".json")
                with suppress(FileNotFoundError):
                    status = entry.stat()
                    stamp = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
                    known = self._read.get(key)
                    found[key] = known if known and known[0] == stamp else (stamp, self._find(key))
        self._read = found
        return {key: ref for key, (_, ref) in found.items() if ref is not None}

    def objects(self) -> Mapping[str, int]:
        folders = (path for path in (self._root / "objects").iterdir() if is_digest(path.name))
        return {path.name: bytes_in(path) for path in folders}

    def leftovers(self) -> Collection[Leftover]:
        return [*self._half_removed(), *self._working_folders(), *self._quarantined()]

    def remove_refs(self, stage_keys: Collection[str], *, needed: Needed) -> list[str]:
        gone: list[str] = []
        for batch in batches(stage_keys):
            with ExitStack() as held:
                ours = [key for key in batch if self._hold(held, key)]
                kept = needed() if ours else ()
                for key in ours:
                    if key not in kept:
                        with locked(self._store.swap_lock(key)):
                            if (ref := self._find(key)) is not None:
                                self._removed.keep_ref(ref)
                            (self._root / "refs" / f"{key}.json").unlink(missing_ok=True)
                        gone.append(key)
                sync_folder(self._root / "refs")
        return gone

    def remove_object(self, digest: str, *, needed: Needed) -> bool:
        with self._store.object_lock(digest):
            if digest in needed():
                return False
            folder = self._root / "objects" / digest
            self._removed.keep_object(folder, digest, self._cause)
            remove_folder(folder)
        return True

    def remove_leftover(self, leftover: Leftover, *, needed: Needed) -> bool:
        with ExitStack() as held:
            if leftover.stage_key is not None:
                if not self._hold(held, leftover.stage_key):
                    return False
                if leftover.is_scratch and leftover.stage_key in needed():
                    return False
            path = self._root / leftover.name
            self._keep_quarantined(path)
            if path.is_dir() and not path.is_symlink():
                remove_folder(path)
            else:
                path.unlink(missing_ok=True)
        return True

    def records(self) -> Mapping[str, int]:
        root = self._root / REMOVED_FOLDER
        folders = root.iterdir() if root.is_dir() else ()
        return {path.name: bytes_in(path) for path in folders if is_digest(path.name)}

    def _keep_quarantined(self, path: Path) -> None:
        """Keep a record of a damaged object that no attempt has made again."""
        digest = path.name.partition(".")[0]
        if path.parent.name != "quarantine" or not is_digest(digest):
            return
        with self._store.object_lock(digest):
            if not self._store.has_object(digest):
                why = f"was found damaged and set aside; {self._cause.why}"
                self._removed.keep_object(path, digest, self._cause.model_copy(update={"why": why}))

    def _find(self, key: str) -> Ref | None:
        try:
            return self._store.find(key)
        except (DamagedRef, ValueError):  # a lookup sets it aside; no object is reached through it
            return None

    def _hold(self, held: ExitStack, key: str) -> bool:
        try:
            held.enter_context(self._store.exclusive(key, holder=HOLDER, timeout=0.0))
        except Locked:
            return False
        return True

    def _half_removed(self) -> Iterator[Leftover]:
        for path in (*self._paths("objects"), *self._paths("scratch"), *self._paths("staging")):
            if REMOVED in path.name:
                yield self._leftover(path)

    def _working_folders(self) -> Iterator[Leftover]:
        """Yield scratch folders, and staging folders of ended attempts whose keys nobody holds."""
        for path in (*self._paths("scratch"), *self._paths("staging")):
            key = path.name.partition(".")[0]
            if is_digest(key) and REMOVED not in path.name:
                yield self._leftover(path, stage_key=key, is_scratch=path.name == key)

    def _quarantined(self) -> Iterator[Leftover]:
        """Yield files in quarantine; their age counts from their last rename, by the clock of the file system."""
        clock = self._root / "locks" / "clock"
        clock.touch()
        now = clock.stat().st_mtime
        for path in self._paths("quarantine"):
            with suppress(FileNotFoundError):  # another collector was faster
                yield self._leftover(path, age_seconds=now - path.lstat().st_ctime)

    def _paths(self, folder: str) -> list[Path]:
        return sorted((self._root / folder).iterdir())

    def _leftover(
        self,
        path: Path,
        *,
        stage_key: str | None = None,
        is_scratch: bool = False,
        age_seconds: float | None = None,
    ) -> Leftover:
        name = path.relative_to(self._root).as_posix()
        return Leftover(name, bytes_in(path), stage_key, is_scratch, age_seconds=age_seconds)
