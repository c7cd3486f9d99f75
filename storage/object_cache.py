"""Cache copies of objects on this machine: verified, bounded in bytes, shared by its processes and by all buckets.

    objects/<digest>/     a copy, complete and found intact when it was fetched
    fetching/…            copies that are being fetched
    removing/…            copies that are being removed
    locks/used-<digest>   locked (shared) by each process that uses the copy; its time of change is the last use
    locks/fetch-<digest>  locked by the process that fetches or replaces the copy

When a copy needs room, the least recently used ones are removed, but never one that a process uses. A folder is
renamed before it is removed, so no process finds half a copy. The kernel releases the locks of a process that dies.
"""

import fcntl
import os
import secrets
import shutil
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from vantage.storage.durable_files import locked, make_folder, move_folder, open_lock, try_lock
from vantage.storage.garbage import bytes_in
from vantage.storage.refs import DamagedObject, uri_of
from vantage.storage.verified_folders import VerifiedFolders

GB_VARIABLE = "VANTAGE_CACHE_GB"
DEFAULT_GB = 100.0


class ObjectCache:
    """The copies below one folder of a local disk."""

    def __init__(self, root: Path, *, max_bytes: int) -> None:
        """Hold copies of at most ``max_bytes``, or more if running processes use more."""
        self.root = root.absolute()
        self._max_bytes = max_bytes
        self._objects, self._fetching, self._removing, self._locks = (
            self.root / name for name in ("objects", "fetching", "removing", "locks")
        )
        for folder in (self._objects, self._fetching, self._removing, self._locks):
            make_folder(folder)
        self._verified = VerifiedFolders()
        self._kept = ExitStack()
        self._keeping: set[str] = set()
        weakref.finalize(self, self._kept.close)

    def keep(self, digest: str, fetch: Callable[[Path], list[str]], size: Callable[[], int]) -> Path:
        """Return the folder of a copy, which stays as long as this instance exists; see ``using``."""
        with self.using(digest, fetch, size) as folder:
            if digest not in self._keeping:
                self._kept.enter_context(_used(self._locks / f"used-{digest}"))
                self._keeping.add(digest)
        return folder

    @contextmanager
    def using(
        self, digest: str, fetch: Callable[[Path], list[str]], size: Callable[[], int]
    ) -> Iterator[Path]:
        """Yield the folder of an intact copy, which is not removed inside the block.

        Args:
            digest: digest of the object.
            fetch: function that fills a new folder and returns its problems.
            size: function that returns the object's bytes; it is called before the object is fetched.

        Raises:
            DamagedObject: the fetched copy is damaged.
        """
        target = self._objects / digest
        with _used(self._locks / f"used-{digest}"):
            with locked(self._locks / f"fetch-{digest}"):
                if not target.is_dir() or self._verified.problems(target, digest=digest):
                    self._move_out(target)
                    self.make_room(size())
                    self._fetch(digest, fetch)
            yield target

    def find(self, digest: str) -> Path | None:
        """Return the folder of a copy, which may be removed at any moment; None: there is none."""
        folder = self._objects / digest
        return folder if folder.is_dir() else None

    def adopt(self, folder: Path, digest: str) -> None:
        """Move a sealed folder of this disk into the cache, unless there is a copy."""
        target = self._objects / digest
        with _used(self._locks / f"used-{digest}"), locked(self._locks / f"fetch-{digest}"):
            if not target.is_dir():
                self.make_room(bytes_in(folder))
                move_folder(folder, target)

    def make_room(self, wanted: int = 0) -> None:
        """Remove unused copies, the least recently used first, until ``wanted`` more bytes fit within the bound."""
        with locked(self._locks / "make-room"):
            self._clear()
            sizes = {path.name: bytes_in(path) for path in self._objects.iterdir()}
            too_many = sum(sizes.values()) + wanted - self._max_bytes
            for digest in sorted(sizes, key=self._last_use):
                if too_many <= 0:
                    return
                if self._remove_unused(digest):
                    too_many -= sizes[digest]

    def _fetch(self, digest: str, fetch: Callable[[Path], list[str]]) -> None:
        new = self._fetching / f"{digest}-{secrets.token_hex(4)}"
        try:
            if problems := fetch(new):
                raise DamagedObject(f"{uri_of(digest)} is damaged: {'; '.join(problems)}")
            move_folder(new, self._objects / digest)
        finally:
            shutil.rmtree(new, ignore_errors=True)

    def _clear(self) -> None:
        """Remove half-fetched or half-removed copies of killed processes."""
        for left in self._removing.iterdir():
            shutil.rmtree(left, ignore_errors=True)
        for left in self._fetching.iterdir():
            lock = open_lock(self._locks / f"fetch-{left.name.partition('-')[0]}")
            try:
                if try_lock(lock):  # a held lock means that the copy is being fetched
                    shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(lock)

    def _last_use(self, digest: str) -> int:
        try:
            return (self._locks / f"used-{digest}").stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def _remove_unused(self, digest: str) -> bool:
        """Remove a copy unless a process uses it; returns whether it was removed."""
        lock = open_lock(self._locks / f"used-{digest}")
        try:
            if not try_lock(lock):
                return False
            self._move_out(self._objects / digest)
            return True
        finally:
            os.close(lock)

    def _move_out(self, folder: Path) -> None:
        away = self._removing / f"{folder.name}-{secrets.token_hex(4)}"
        if os.path.lexists(folder):
            os.rename(folder, away)
            shutil.rmtree(away, ignore_errors=True)


def max_bytes_from(environment: os._Environ[str] | dict[str, str]) -> int:
    """Return the bound that ``$VANTAGE_CACHE_GB`` sets, in bytes.

    Raises:
        ValueError: the variable is no positive number.
    """
    text = environment.get(GB_VARIABLE) or str(DEFAULT_GB)
    try:
        gigabytes = float(text)
    except ValueError:
        gigabytes = -1.0
    if not 0 < gigabytes < float("inf"):
        raise ValueError(
            f"{GB_VARIABLE}={text!r} is no positive number of gigabytes; set one, such as {DEFAULT_GB:g}"
        )
    return int(gigabytes * 1e9)


@contextmanager
def _used(path: Path) -> Iterator[None]:
    """Hold the shared lock of a copy, and note its use."""
    lock = open_lock(path)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        os.utime(path)
        yield
    finally:
        os.close(lock)
